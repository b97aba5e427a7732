"""How evenly experts are used: a heat map for each layer, and the busiest relative to the mean.

In: the lines of steps.jsonl. Out: columns for drawing. Four experts that got 10, 10, 20 and 0
tokens in a step have shares of 100, 100, 200 and 0 hundredths of an even share, and a peak of 2.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from longshore.report.run_curves import MOST_POINTS, Json, curve, edges, rounded
from longshore.report.run_journal import JournalLine

Floats = NDArray[np.float64]

MOST_CELLS = 100_000
MOST_COLUMNS = 100
STARVED = 0.1


def experts_data(lines: Mapping[int, JournalLine], *, cells: int = MOST_CELLS) -> Json | None:
    """Maps, peaks and a row for each layer; None for a model without experts.

    `maps` has a list for each layer, in it one for each expert, in it a number for each column.
    """
    shape = next((_shape(line) for line in lines.values() if line.experts), ())
    kept = {step: line for step, line in lines.items() if shape and _shape(line) == shape}
    if not kept:
        return None
    steps = np.array(list(kept), dtype=np.int64)
    columns = max(4, min(MOST_COLUMNS, cells // sum(shape)))
    at = edges(len(steps), most=columns)
    layers = [
        np.stack([line.experts[layer] for line in kept.values()]) for layer in range(len(shape))
    ]
    summed = [np.add.reduceat(tokens, at[:-1], axis=0) for tokens in layers]
    return {
        "experts": list(shape),
        "step": steps[at[1:] - 1].tolist(),
        "first": int(steps[0]),
        "maps": [np.rint(relative(tokens) * 100).astype(int).T.tolist() for tokens in summed],
        "peak": peak_curve(steps, [relative(tokens).max(axis=1) for tokens in layers]),
        "rows": [layer_row(tokens.sum(axis=0)) for tokens in layers],
    }


def relative(tokens: NDArray[np.int64]) -> Floats:
    """Tokens [step, expert] as multiples of an even share; 1 where no expert had any."""
    mean = tokens.mean(axis=-1, keepdims=True)
    return np.where(mean > 0, tokens / np.where(mean > 0, mean, 1.0), 1.0)


def peak_curve(steps: NDArray[np.int64], peaks: list[Floats]) -> Json:
    """The busiest expert relative to the mean: mean, minimum and maximum over the layers."""
    each = np.stack(peaks)
    at = edges(len(steps), most=MOST_POINTS)
    low, high = (curve(extreme, at) for extreme in (each.min(axis=0), each.max(axis=0)))
    return {
        "step": steps[at[1:] - 1].tolist(),
        "y": curve(each.mean(axis=0), at)["y"],
        "low": low.get("low", low["y"]),
        "high": high.get("high", high["y"]),
    }


def layer_row(tokens: NDArray[np.int64]) -> Json:
    """A layer over all steps: its busiest and idlest experts, and how many are starved."""
    shares = relative(tokens)
    return {
        "busiest": int(shares.argmax()),
        "most": rounded([shares.max()], 4)[0],
        "idlest": int(shares.argmin()),
        "least": rounded([shares.min()], 4)[0],
        "starved": int((shares < STARVED).sum()),
    }


def _shape(line: JournalLine) -> tuple[int, ...]:
    return tuple(len(layer) for layer in line.experts)
