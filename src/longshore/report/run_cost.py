"""How good the cost model is: predicted against measured seconds of rounds.

In: the lines of steps.jsonl. Out: a CostFit, points to draw, and a verdict as text. The seconds of
a profile made for another machine are off by one factor, which does not change plans; so the factor
is removed first. Rounds predicted at 1, 2 and 3 s that took 2, 4 and 9 s have ratios 2, 2
and 3: the factor is their median, 2, and the errors are 0 %, 0 % and 50 %, with median 0 %.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longshore.report.run_curves import MOST_POINTS, Json, curve, edges, rounded
from longshore.report.run_journal import JournalLine

Floats = NDArray[np.float64]

MOST_DOTS = 1200
FEW = 5
ALIKE = 0.05
JUDGEMENTS = ((0.05, "very good"), (0.12, "good"), (0.25, "rough"), (math.inf, "poor"))


@dataclass(frozen=True, slots=True)
class CostFit:
    """How well predictions match after scaling by the best factor."""

    rounds: int
    """Rounds that were compared."""
    factor: float
    """The median of measured / predicted."""
    low: float
    """The 5th percentile of measured / predicted, relative to `factor`."""
    high: float
    """The 95th percentile of measured / predicted, relative to `factor`."""
    error: float
    """The median relative error after scaling."""
    correlation: float | None
    """Of predicted and measured; None if either is constant."""
    variety: float
    """How much predictions differ: standard deviation / mean."""
    skipped: int | None
    """The first step, which is left out, or None."""


def cost_data(lines: Mapping[int, JournalLine], *, refined: int = 0) -> Json | None:
    """The fit, its text, dots for a scatter plot, and the ratio over steps; None without times.

    The first step, in which memory and kernels warm up, is left out of the fit and of the dots if
    there are enough others; so are those before the step `refined`, planned with other profiles.
    """
    measured = {step: line for step, line in lines.items() if line.measured}
    if not measured:
        return None
    kept = {step: line for step, line in measured.items() if step >= refined}
    if len(kept) < FEW:
        kept, refined = measured, 0
    first = next(iter(kept)) if len(kept) >= FEW and not refined else None
    kept = {step: line for step, line in kept.items() if step != first}
    predicted = np.concatenate([line.predicted for line in kept.values()])
    elapsed = np.concatenate([line.elapsed for line in kept.values()])
    steps = np.concatenate([np.full(len(line.elapsed), step) for step, line in kept.items()])
    fit = fit_cost(predicted, elapsed, skipped=first)
    dots = choose_dots(predicted, elapsed / predicted)
    return {
        **{name: _short(value) for name, value in asdict(fit).items()},
        "verdict": verdict(fit),
        "words": cost_text(fit, refined=refined),
        "dots": {
            "predicted": rounded(predicted[dots]),
            "elapsed": rounded(elapsed[dots]),
            "step": steps[dots].tolist(),
        },
        "ratio": ratio_curve(measured),
    }


def fit_cost(predicted: Floats, elapsed: Floats, *, skipped: int | None = None) -> CostFit:
    ratios = elapsed / predicted
    factor = float(np.median(ratios))
    low, high = np.quantile(ratios, (0.05, 0.95)) / factor
    spread = predicted.std() * elapsed.std()
    together = ((predicted - predicted.mean()) * (elapsed - elapsed.mean())).mean()
    still = spread <= 1e-12 * predicted.mean() * elapsed.mean()
    return CostFit(
        rounds=len(ratios),
        factor=factor,
        low=float(low),
        high=float(high),
        error=float(np.median(np.abs(ratios / factor - 1))),
        correlation=None if still else float(together / spread),
        variety=float(predicted.std() / predicted.mean()),
        skipped=skipped,
    )


def verdict(fit: CostFit) -> str:
    return next(word for most, word in JUDGEMENTS if fit.error <= most)


def cost_text(fit: CostFit, *, refined: int = 0) -> str:
    """The verdict, for readers new to cost models."""
    sentences = [
        f"The cost model is {verdict(fit)} here: after scaling by one factor, half of the "
        f"{fit.rounds:,} rounds were within {fit.error:.0%} of the prediction.",
        f"The factor is {fit.factor:.3g}: a round takes {fit.factor:.3g} times as long as "
        "predicted. A factor other than 1 means that the profile is for another machine or model; "
        "plans do not depend on it.",
        f"Nine of ten rounds took {fit.low:.2f} to {fit.high:.2f} times the scaled prediction.",
    ]
    if fit.variety < ALIKE:
        sentences.append(
            "Predictions hardly differ from round to round, so correlation says little."
        )
    elif fit.correlation is not None:
        sentences.append(
            f"The correlation of predicted and measured times is {fit.correlation:.2f} (1 is best)."
        )
    if fit.skipped is not None:
        sentences.append(f"Step {fit.skipped}, in which memory and kernels warm up, is left out.")
    if refined:
        sentences.append(
            f"Steps before {refined} are left out: plan.refine last corrected the profile there."
        )
    return " ".join(sentences)


def choose_dots(predicted: Floats, ratios: Floats, *, most: int = MOST_DOTS) -> list[int]:
    """All indices, or of each group of similar predictions the first and the two extremes."""
    if len(predicted) <= most:
        return list(range(len(predicted)))
    order = np.argsort(predicted, kind="stable")
    at = edges(len(order), most=most // 3)
    chosen: set[int] = set()
    for start, end in pairwise(at.tolist()):
        group = order[start:end]
        low, high = group[ratios[group].argmin()], group[ratios[group].argmax()]
        chosen |= {int(group[0]), int(low), int(high)}
    return sorted(chosen)


def ratio_curve(lines: Mapping[int, JournalLine]) -> Json:
    """Measured / predicted of each step, thinned like the other curves."""
    steps = np.array(list(lines), dtype=np.int64)
    ratios = np.array([line.elapsed.sum() / line.predicted.sum() for line in lines.values()])
    at = edges(len(steps), most=MOST_POINTS)
    return {"step": steps[at[1:] - 1].tolist(), **curve(ratios, at)}


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else rounded([value], 4)[0]
