"""The record of a refined cost profile: RUN/refine.jsonl, and a line for people at each change.

In: StepReports. Out: their times go to the Refiner, and rank 0 writes what each window of steps
said about the profile, once the first step that was planned with it has run. Factors are relative
to the profile that the run began with. Ratios are medians of measured / predicted seconds: under
that profile, before this correction and after it; a kind is [largest CP size, rounds, ratios].

    {"step": 21, "window": [5, 16], "changed": true, "rounds": 23, "left_out": 1, "factors":
     {"linear": 1.17, "quadratic": 5.63, …}, "errors": [0.34, 0.34, 0.11],
     "kinds": [[1, 5, 1.17, 1.17, 0.95], [4, 12, 1.8, 1.8, 1.14]]}
"""

import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

from longshore.distributed.topology import Topology
from longshore.plan.cost import CostProfile
from longshore.plan.refine import PARTS, coefficients
from longshore.train.checkpoint_files import writing
from longshore.train.loop import StepReport
from longshore.train.metrics import cut_steps
from longshore.train.refine import Refinement, Refiner

FILE = "refine.jsonl"


def refining(
    run: Path,
    refiner: Refiner | None,
    topology: Topology,
    *,
    after: int,
    note: Callable[[str], None],
) -> Callable[[StepReport], None]:
    """A function that takes each step's report, before the loop takes another step.

    after: the steps of an earlier run that stay in the file. note: shows a line.
    """
    if refiner is None:
        return lambda report: None
    path, is_first = run / FILE, topology.rank == 0
    if is_first:
        with writing(run):
            cut_steps(path, after)

    def take(report: StepReport) -> None:
        step = report.metrics.step
        refiner.measured(step, report.step.plan, report.rounds_s)
        for news in refiner.news(step) if is_first else ():
            line = json.dumps(as_line(news, refiner.base), allow_nan=False)
            with writing(run), open(path, "a", encoding="utf-8") as out:
                out.write(line + "\n")
            if news.refit.is_changed:
                note(as_text(news, refiner.base))

    return take


def as_line(news: Refinement, base: CostProfile) -> dict[str, object]:
    fitted = news.refit
    return {
        "step": news.step,
        "window": list(news.window),
        "changed": fitted.is_changed,
        "rounds": fitted.rounds,
        "left_out": fitted.left_out,
        "factors": _factors(news, base),
        "errors": list(fitted.errors),
        "kinds": [list(astuple(kind)) for kind in fitted.kinds],
    }


def as_text(news: Refinement, base: CostProfile) -> str:
    factors = ", ".join(f"{name} × {value:.3g}" for name, value in _factors(news, base).items())
    _, before, after = news.refit.errors
    first, last = news.window
    return (
        f"step {news.step}: the cost profile is refined by steps {first} to {last}: {factors} of "
        f"the first profile; typical error of a round {before:.0%} before, {after:.0%} after"
    )


def _factors(news: Refinement, base: CostProfile) -> dict[str, float]:
    """Of the parts that the profile has."""
    named = zip(PARTS, coefficients(base), news.refit.correction.factors, strict=True)
    return {name: factor for name, value, factor in named if value}
