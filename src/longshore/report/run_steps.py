"""Single steps of a run: the slowest with the reasons, and timelines of as many as fit a page.

In: a RunFolder. Out: a row for each of the slowest steps, slowest first. In a run whose steps take
1 s, one of 3 s that waited 1.8 s for its data has that as its reason:

    {"step": 7, "elapsed": 3.0, "times": 3.0, …, "why": ["waited 1.8 s for data"]}

And for each chosen step the data of its timeline (times in ticks, packs as columns; see
page_data.py) with the predicted and measured seconds of its rounds. Of 1000 steps with a limit of
200 the first, the last and the slowest ten are chosen, and about every fifth.
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
"""A wait is a reason if it is at least this share of the extra time."""
COLUMNS = ("data_wait_s", "plan_s", "tokens", "rounds", "efficiency", "padding")
UNEXPLAINED = "no reason in the recorded metrics"
FIRST = "the first step: warm-up of memory and kernels"


def slowest_indices(metrics: Mapping[str, Floats], *, most: int = MOST_ROWS) -> list[int]:
    """The indices of the slowest steps, the slowest first; ties go to the earlier step."""
    elapsed = np.nan_to_num(metrics["elapsed_s"], nan=-math.inf)
    order = np.argsort(-elapsed, kind="stable")[:most]
    return [int(index) for index in order if math.isfinite(elapsed[index])]


def slow_steps(run: RunFolder) -> list[Json]:
    metrics, usual = run.metrics, usual_values(run.metrics)
    ratio = _ratios(run.journal.lines)
    rows = []
    for index in slowest_indices(metrics):
        values = {name: float(metrics[name][index]) for name in ("elapsed_s", *COLUMNS)}
        step = int(run.steps[index])
        reasons = [FIRST] if index == 0 else []
        reasons += why(values, usual, ratio=ratio.get(step), usual_ratio=_median(ratio.values()))
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
    """The median of each column over the steps that have it; NaN if none has."""
    return {name: _median(metrics[name]) for name in ("elapsed_s", *COLUMNS)}


def why(
    values: Mapping[str, float],
    usual: Mapping[str, float],
    *,
    ratio: float | None,
    usual_ratio: float,
) -> list[str]:
    """How the step differs from others; ratio: measured / predicted seconds of its rounds."""
    reasons = [*_waits(values, usual), *_work(values, usual)]
    if ratio is not None and ratio > 1.25 * usual_ratio:
        reasons.append(f"rounds took {ratio / usual_ratio:.1f} × the time the cost model predicts")
    return reasons


def _waits(values: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[str]:
    """Steps are planned ahead, so planning matters only if the step had to wait for it."""
    more = values["elapsed_s"] - usual["elapsed_s"]
    wait = values["data_wait_s"]
    if more > 0 and wait - usual["data_wait_s"] >= EXPLAINS * more:
        planning = values["plan_s"] >= EXPLAINS * wait
        yield f"waited {wait:.3g} s for data" + (
            f" (planning took {values['plan_s']:.3g} s)" if planning else ""
        )


def _work(values: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[str]:
    """Comparisons with NaN are false, so an unknown value is never a reason."""
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


def _median(values: object) -> float:
    known = np.array([value for value in values if math.isfinite(value)])  # type: ignore[attr-defined]
    return float(np.median(known)) if len(known) else math.nan


MOST_STEPS = 200
MOST_BYTES = 4_000_000
SWELL = 2.5
"""Bytes of a step on the page, relative to its line in steps.jsonl, roughly."""


def steps_data(run: RunFolder, *, share: float = 1.0) -> list[Json]:
    """Timelines of the chosen steps; `share` is the run's share of the page's bytes."""
    policy = str(run.config.get("plan.policy", DEFAULT_POLICY))
    lines = run.journal.lines
    return [
        timeline_data(step, run.journal.plan(step, policy=policy), lines[step])
        for step in choose_steps(run, share=share)
    ]


def choose_steps(run: RunFolder, *, share: float = 1.0) -> list[int]:
    """All steps of steps.jsonl if they are few, else the first, last, slowest and evenly spaced."""
    lines = run.journal.lines
    steps = list(lines)
    if not steps:
        return []
    mean = sum(line.size for line in lines.values()) / len(lines)
    most = int(min(MOST_STEPS, share * MOST_BYTES / (SWELL * mean)))
    if len(steps) <= most:
        return steps
    slowest = {int(run.steps[index]) for index in slowest_indices(run.metrics)}
    chosen = {steps[0], steps[-1], *(slowest & lines.keys())}
    if (more := most - len(chosen)) > 0:
        chosen |= {steps[index] for index in edges(len(steps), most=more)[:-1]}
    return sorted(chosen)


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
