"""How good the cost model is: predicted against measured seconds of rounds.

In: the lines of a journal. Out: a CostFit, points to draw, and a judgement in words. Absolute
seconds of a profile for another machine are off by one factor, which plans do not notice; so the
factor is taken out first. Rounds predicted at 1, 2 and 3 s that took 2, 4 and 9 s have ratios 2, 2
and 3: the factor is their median 2, and the errors are 0 %, 0 % and 50 %, in the middle 0 %.
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
    """What remains when predictions are scaled by the best factor.

    factor: the median of measured / predicted. low, high: nine of ten ratios in the middle lie
    between these, in factors. error: the middle distance of measured from scaled prediction, as a
    share. correlation: of the two, None where either never changes. variety: how much predictions
    differ, as standard deviation / mean. skipped: the first step, which is left out, or None.
    """

    rounds: int
    factor: float
    low: float
    high: float
    error: float
    correlation: float | None
    variety: float
    skipped: int | None


def cost_data(lines: Mapping[int, JournalLine]) -> Json | None:
    """The fit, its words, dots for a scatter, and the ratio over steps; None where none measured.

    In its first step a machine makes memory and kernels ready: it is left out of the fit and of the
    dots, where there are others.
    """
    measured = {step: line for step, line in lines.items() if line.measured}
    if not measured:
        return None
    first = next(iter(measured)) if len(measured) >= FEW else None
    kept = {step: line for step, line in measured.items() if step != first}
    predicted = np.concatenate([line.predicted for line in kept.values()])
    elapsed = np.concatenate([line.elapsed for line in kept.values()])
    steps = np.concatenate([np.full(len(line.elapsed), step) for step, line in kept.items()])
    fit = fit_cost(predicted, elapsed, skipped=first)
    dots = choose_dots(predicted, elapsed / predicted)
    return {
        **{name: _short(value) for name, value in asdict(fit).items()},
        "verdict": verdict(fit),
        "words": cost_words(fit),
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


def cost_words(fit: CostFit) -> str:
    """The judgement, for a person who has not read about cost models."""
    found = [
        f"The cost model is {verdict(fit)} here: scaled by one factor, half of the "
        f"{fit.rounds:,} rounds took within {fit.error:.0%} of what it says.",
        f"The factor is {fit.factor:.3g}: a round takes {fit.factor:.3g} times as long as "
        "predicted. A factor away from 1 means another machine or model than the profile's, and "
        "does no harm to plans.",
        f"Nine rounds of ten lie between {fit.low:.2f} and {fit.high:.2f} times that.",
    ]
    if fit.variety < ALIKE:
        found.append("Predictions hardly differ from round to round, so correlation says little.")
    elif fit.correlation is not None:
        found.append(f"Predicted and measured times correlate by {fit.correlation:.2f} (best: 1).")
    if fit.skipped is not None:
        found.append(f"Step {fit.skipped}, in which memory and kernels get ready, is left out.")
    return " ".join(found)


def choose_dots(predicted: Floats, ratios: Floats, *, most: int = MOST_DOTS) -> list[int]:
    """All places, or of each run of similar predictions the first and the two extremes."""
    if len(predicted) <= most:
        return list(range(len(predicted)))
    order = np.argsort(predicted, kind="stable")
    at = edges(len(order), most=most // 3)
    kept: set[int] = set()
    for start, end in pairwise(at.tolist()):
        run = order[start:end]
        best, worst = run[ratios[run].argmin()], run[ratios[run].argmax()]
        kept |= {int(run[0]), int(best), int(worst)}
    return sorted(kept)


def ratio_curve(lines: Mapping[int, JournalLine]) -> Json:
    """Measured / predicted of each whole step, thinned as the other curves are."""
    steps = np.array(list(lines), dtype=np.int64)
    ratios = np.array([line.elapsed.sum() / line.predicted.sum() for line in lines.values()])
    at = edges(len(steps), most=MOST_POINTS)
    return {"step": steps[at[1:] - 1].tolist(), **curve(ratios, at)}


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else rounded([value], 4)[0]
