"""The timelines of a run's steps, few enough for a page.

In: a RunFolder. Out: for each chosen step what the plan page's drawing wants (times in ticks, packs
as columns; see page_data.py) and the predicted and measured seconds of its rounds. Of 1000 steps
with a cap of 200 the first, the last and the slowest ten are kept, and about every fifth.
"""

import numpy as np

from longshore.plan.types import Plan
from longshore.report.page_data import TICKS, Json, one_or_many, pack_columns, significant, ticks
from longshore.report.run_curves import edges, rounded
from longshore.report.run_files import RunFolder
from longshore.report.run_journal import Line
from longshore.report.run_slow import slowest_places
from longshore.report.timeline import make_timeline

MOST_STEPS = 200
MOST_BYTES = 4_000_000
SWELL = 2.5
"""A step takes about so many times the bytes of its journal line on the page."""


def steps_data(run: RunFolder, *, share: float = 1.0) -> list[Json]:
    """Timelines of the chosen steps; `share` is the run's part of the page's bytes."""
    policy = str(run.config.get("plan.policy", "mixed"))
    lines = run.journal.lines
    return [
        timeline_data(step, run.journal.plan(step, policy=policy), lines[step])
        for step in choose_steps(run, share=share)
    ]


def choose_steps(run: RunFolder, *, share: float = 1.0) -> list[int]:
    """All steps of the journal if they are few, else the first, last, slowest and even ones."""
    lines = run.journal.lines
    steps = list(lines)
    if not steps:
        return []
    mean = sum(line.size for line in lines.values()) / len(lines)
    most = int(min(MOST_STEPS, share * MOST_BYTES / (SWELL * mean)))
    if len(steps) <= most:
        return steps
    slowest = {int(run.steps[place]) for place in slowest_places(run.metrics)}
    kept = {steps[0], steps[-1], *(slowest & lines.keys())}
    if (more := most - len(kept)) > 0:
        kept |= {steps[place] for place in edges(len(steps), most=more)[:-1]}
    return sorted(kept)


def timeline_data(step: int, plan: Plan, line: Line) -> Json:
    timeline = make_timeline(plan)
    unit = timeline.total / TICKS
    lengths = np.array([sequence.length for sequence in plan.sequences], dtype=np.int64)
    return {
        "step": step,
        "lanes": plan.setting.lanes,
        "capacity": plan.setting.capacity,
        "sync": plan.setting.sync,
        "lengths": lengths.tolist(),
        "unit": unit,
        "total": TICKS,
        "overhead": round(plan.setting.profile.round / unit),
        "start": [one_or_many(row, unit) for row in timeline.start],
        "end": [one_or_many(row, unit) for row in timeline.end],
        "busy": [ticks(row, unit) for row in timeline.cost],
        "idle": significant(timeline.idle),
        "packs": pack_columns(plan, timeline, unit),
        "predicted": rounded(line.predicted),
        "elapsed": rounded(line.elapsed),
    }
