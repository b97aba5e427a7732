"""The slowest steps of a run, and why they were slow.

In: a RunFolder. Out: rows with reasons, the largest first. In a run whose steps take 1 s, one of
3 s that waited 1.8 s for its data explains most of its 2 s more by that:

    {"step": 7, "elapsed": 3.0, "times": 3.0, …, "why": ["waited 1.8 s for data"]}

The timelines of a run's steps, few enough for a page.

In: a RunFolder. Out: for each chosen step what the plan page's drawing wants (times in ticks, packs
as columns; see page_data.py) and the predicted and measured seconds of its rounds. Of 1000 steps
with a cap of 200 the first, the last and the slowest ten are kept, and about every fifth.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from longshore.plan.policy import DEFAULT_POLICY
from longshore.plan.types import Plan
from longshore.report.page_data import TICKS, Json, one_or_many, pack_columns, significant, ticks
from longshore.report.run_curves import edges, rounded
from longshore.report.run_files import RunFolder
from longshore.report.run_journal import JournalLine
from longshore.report.timeline import make_timeline

Floats = NDArray[np.float64]

MOST_ROWS = 10
EXPLAINS = 0.25
"""A wait explains a slow step when it makes up this share of the extra time."""
COLUMNS = ("data_wait_s", "plan_s", "tokens", "rounds", "efficiency", "padding")
UNEXPLAINED = "nothing that was recorded explains it"
FIRST = "the first step: memory and kernels are made ready"


def slowest_places(metrics: Mapping[str, Floats], *, most: int = MOST_ROWS) -> list[int]:
    """The places of the slowest steps, the slowest first; ties go to the earlier step."""
    elapsed = np.nan_to_num(metrics["elapsed_s"], nan=-math.inf)
    order = np.argsort(-elapsed, kind="stable")[:most]
    return [int(place) for place in order if math.isfinite(elapsed[place])]


def slow_steps(run: RunFolder) -> list[Json]:
    metrics, usual = run.metrics, usual_values(run.metrics)
    ratio = _ratios(run.journal.lines)
    rows = []
    for place in slowest_places(metrics):
        values = {name: float(metrics[name][place]) for name in ("elapsed_s", *COLUMNS)}
        step = int(run.steps[place])
        reasons = [FIRST] if place == 0 else []
        reasons += why(values, usual, ratio=ratio.get(step), usual_ratio=_middle(ratio.values()))
        rows.append(
            {
                "step": step,
                "elapsed": values["elapsed_s"],
                "times": rounded([values["elapsed_s"] / usual["elapsed_s"]], 3)[0],
                **{name: rounded([values[name]])[0] for name in COLUMNS},
                "why": reasons or [UNEXPLAINED],
            }
        )
    return rows


def usual_values(metrics: Mapping[str, Floats]) -> dict[str, float]:
    """The median of each column over the steps that have it; NaN where none has."""
    return {name: _middle(metrics[name]) for name in ("elapsed_s", *COLUMNS)}


def why(
    values: Mapping[str, float],
    usual: Mapping[str, float],
    *,
    ratio: float | None,
    usual_ratio: float,
) -> list[str]:
    """What was unlike other steps; ratio: measured / predicted seconds of the step's rounds."""
    found = [*_waits(values, usual), *_work(values, usual)]
    if ratio is not None and ratio > 1.25 * usual_ratio:
        found.append(f"rounds took {ratio / usual_ratio:.1f} × what the cost model leads to expect")
    return found


def _waits(values: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[str]:
    """Steps are planned ahead, so planning costs time only where it made the step wait."""
    more = values["elapsed_s"] - usual["elapsed_s"]
    wait = values["data_wait_s"]
    if more > 0 and wait - usual["data_wait_s"] >= EXPLAINS * more:
        planning = values["plan_s"] >= EXPLAINS * wait
        yield f"waited {wait:.3g} s for data" + (
            f" (planning took {values['plan_s']:.3g} s)" if planning else ""
        )


def _work(values: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[str]:
    """Comparisons with NaN are false, so what is not known is no reason."""
    if values["tokens"] > 1.25 * usual["tokens"]:
        yield f"{values['tokens'] / usual['tokens']:.1f} × the usual tokens"
    if values["rounds"] > usual["rounds"]:
        yield f"{values['rounds']:.0f} rounds (usually {usual['rounds']:.0f})"
    if values["efficiency"] < usual["efficiency"] - 0.05:
        yield f"plan efficiency {values['efficiency']:.0%} (usually {usual['efficiency']:.0%})"
    if values["padding"] > usual["padding"] + 0.03:
        yield f"padding {values['padding']:.0%} (usually {usual['padding']:.0%})"


def _ratios(lines: Mapping[int, JournalLine]) -> dict[int, float]:
    return {
        step: float(line.elapsed.sum() / line.predicted.sum())
        for step, line in lines.items()
        if line.measured
    }


def _middle(values: object) -> float:
    known = np.array([value for value in values if math.isfinite(value)])  # type: ignore[attr-defined]
    return float(np.median(known)) if len(known) else math.nan


MOST_STEPS = 200
MOST_BYTES = 4_000_000
SWELL = 2.5
"""A step takes about so many times the bytes of its journal line on the page."""


def steps_data(run: RunFolder, *, share: float = 1.0) -> list[Json]:
    """Timelines of the chosen steps; `share` is the run's part of the page's bytes."""
    policy = str(run.config.get("plan.policy", DEFAULT_POLICY))
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


def timeline_data(step: int, plan: Plan, line: JournalLine) -> Json:
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
