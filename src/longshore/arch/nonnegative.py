"""Least squares with coefficients of 0 or more, exact for a few of them. NumPy only.

In: rows of amounts and the seconds of each row. Out: the seconds of each amount, so that relative
errors are smallest: each row is divided by its seconds, or by given totals. Every subset of the
columns is tried, so there are at most 8.

    amounts (1, 10), (1, 20), (1, 40) in 3, 5 and 9 seconds: 1 and 0.2
"""

from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np

MOST_COLUMNS = 8


def fit_nonnegative(
    amounts: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    totals: Sequence[float] | None = None,
) -> list[float]:
    """Coefficients of the columns; those of columns that are 0 everywhere are 0.

    totals: what an error is relative to, where `seconds` are only a part of it.
    """
    scale = np.array(seconds if totals is None else totals, dtype=np.float64)
    matrix = np.array(amounts, dtype=np.float64) / scale[:, None]
    wanted = np.array(seconds, dtype=np.float64) / scale
    columns = matrix.shape[1]
    assert columns <= MOST_COLUMNS, columns
    sizes = np.abs(matrix).max(axis=0)
    used = [column for column in range(columns) if sizes[column] > 0]
    matrix[:, used] /= sizes[used]
    best, least = np.zeros(columns), float((wanted**2).sum())
    subsets = chain.from_iterable(combinations(used, n) for n in range(1, len(used) + 1))
    for subset in map(list, subsets):
        own = np.linalg.lstsq(matrix[:, subset], wanted, rcond=None)[0]
        if own.min() < 0:
            continue
        error = float(((matrix[:, subset] @ own - wanted) ** 2).sum())
        if error < least - 1e-12:
            best, least = np.zeros(columns), error
            best[subset] = own / sizes[subset]
    result: list[float] = best.tolist()
    return result
