"""Least squares with coefficients of 0 or more, exact for a few of them. NumPy only.

In: rows of amounts and the seconds of each row. Out: the seconds of each amount, so that relative
errors are smallest: each row is divided by its seconds. Every subset of the columns is tried, so
there are at most 8.

    amounts (1, 10), (1, 20), (1, 40) in 3, 5 and 9 seconds: 1 and 0.2
"""

from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

MOST_COLUMNS = 8


def fit_nonnegative(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients of the columns; those of columns that are 0 everywhere are 0.

    Rows that take no time, or less, are left out.
    """
    kept = [(row, time) for row, time in zip(amounts, seconds, strict=True) if time > 0]
    columns = len(amounts[0])
    assert columns <= MOST_COLUMNS, columns
    if not kept:
        return [0.0] * columns
    scaled = np.array([[amount / time for amount in row] for row, time in kept])
    sizes = np.abs(scaled).max(axis=0)
    used = [column for column in range(columns) if sizes[column] > 0]
    scaled[:, used] /= sizes[used]
    best, least = np.zeros(columns), float(len(kept))
    subsets = chain.from_iterable(combinations(used, n) for n in range(1, len(used) + 1))
    for subset in subsets:
        own = _solve(scaled[:, subset])
        if own.min() < 0:
            continue
        error = float(((scaled[:, subset] @ own - 1) ** 2).sum())
        if error < least - 1e-12:
            best, least = np.zeros(columns), error
            best[list(subset)] = own / sizes[list(subset)]
    result: list[float] = best.tolist()
    return result


def _solve(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    solution: NDArray[np.float64] = np.linalg.lstsq(columns, np.ones(len(columns)), rcond=None)[0]
    return solution
