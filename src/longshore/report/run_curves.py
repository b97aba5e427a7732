"""Curves of thousands of steps as at most a thousand points, without losing spikes.

In: an array for each metric. Out: the mean of each group of neighbouring steps, with its minimum
and maximum where a point covers several steps. Six steps in three points:

    edges(6, most=3) = [0, 2, 4, 6]
    curve([1, 3, 9, 1, 2, 2], [0, 2, 4, 6]) = {"y": [2, 5, 2], "low": [1, 1, 2], "high": [3, 9, 2]}
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Json = dict[str, Any]

MOST_POINTS = 1000
SHOWN = (
    "loss",
    "balance_loss",
    "index_loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "tflops",
    "mfu",
    "elapsed_s",
    "rounds",
    "efficiency",
    "padding",
    "plan_s",
    "data_wait_s",
    "memory_gib",
)


def run_curves(metrics: Mapping[str, Floats], *, most: int = MOST_POINTS) -> Json:
    """Every metric that has a value, and the steps, tokens and seconds of its points.

    A point is at the last of its steps, with the tokens and seconds from the run's first step to
    the end of that one.
    """
    at = edges(len(metrics["step"]), most=most)
    last = at[1:] - 1
    others = [name for name in metrics if name.startswith(("depth_", "own_"))]
    known = [name for name in (*SHOWN, *others) if np.isfinite(metrics[name]).any()]
    return {
        "step": metrics["step"][last].astype(np.int64).tolist(),
        "first": int(metrics["step"][0]),
        "tokens": rounded(total(metrics["tokens"])[last], 9),
        "seconds": rounded(total(metrics["elapsed_s"])[last], 6),
        "curves": {name: curve(metrics[name], at) for name in known},
    }


def edges(count: int, *, most: int) -> Ints:
    """Divides `count` steps into at most `most` groups of almost the same size."""
    points = min(count, most)
    return np.arange(points + 1, dtype=np.int64) * count // points


def curve(values: Floats, at: Ints) -> Json:
    """Mean, minimum and maximum of each group; null where no step of it has a value."""
    if len(at) == len(values) + 1:
        return {"y": rounded(values)}
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.int64), at[:-1])
    sums = np.add.reduceat(np.where(known, values, 0.0), at[:-1])
    means = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    low, high = np.fmin.reduceat(values, at[:-1]), np.fmax.reduceat(values, at[:-1])
    return {"y": rounded(means), "low": rounded(low), "high": rounded(high)}


def total(values: Floats) -> Floats:
    """The cumulative sum; a step without a value adds nothing."""
    return np.cumsum(np.nan_to_num(values))


def rounded(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """For JSON, with so many significant digits; values that are not finite become None."""
    return [_rounded(float(value), digits) for value in values]


def _rounded(value: float, digits: int) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
