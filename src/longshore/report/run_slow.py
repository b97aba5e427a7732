"""The slowest steps of a run, and why they were slow.

In: a RunFolder. Out: rows with reasons, the largest first. In a run whose steps take 1 s, one of
3 s that waited 1.8 s for its data explains most of its 2 s more by that:

    {"step": 7, "elapsed": 3.0, "times": 3.0, …, "why": ["waited 1.8 s for data"]}
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from longshore.report.run_curves import Json, rounded
from longshore.report.run_files import RunFolder
from longshore.report.run_journal import Line

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


def _ratios(lines: Mapping[int, Line]) -> dict[int, float]:
    return {
        step: float(line.elapsed.sum() / line.predicted.sum())
        for step, line in lines.items()
        if line.measured
    }


def _middle(values: object) -> float:
    known = np.array([value for value in values if math.isfinite(value)])  # type: ignore[attr-defined]
    return float(np.median(known)) if len(known) else math.nan
