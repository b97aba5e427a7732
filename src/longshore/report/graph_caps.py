"""CUDA graphs: how many micro-batches a cap on sequences covers, and what its padding costs.

In: sequences of micro-batches that have one pack of CP size 1, as plan/graph_use.py counts them:
the padding that rounds a lane's tokens up to a bucket is one more. Out: one row for each candidate
cap. Whole layers are replayed only for these micro-batches, and only up to the cap; all others are
served by halves of layers, without a cap.

Micro-batches of 1, 1, 2 and 5 sequences: cap 2 covers 3 of 4, and of its 3 · 2 slots 2 stay empty,
0.67 on average.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class CapRow:
    """One candidate cap."""

    cap: int
    """The most sequences of a micro-batch."""
    marks: tuple[str, ...]
    """The percentiles that equal it, such as ("P50",)."""
    covered: float
    """Share of micro-batches with at most `cap` sequences, padding included."""
    empty_slots: float
    """Empty slots of the covered micro-batches, on average."""
    empty_share: float
    """empty_slots / cap."""


def cap_rows(sizes: Ints) -> list[CapRow]:
    """A row for 1, 2, 4, … up to the first power that covers all, and for each percentile."""
    if not len(sizes):
        return []
    marks = percentile_marks(sizes)
    largest = int(sizes.max())
    powers = [1 << bit for bit in range((largest - 1).bit_length() + 1)]
    return [_cap_row(sizes, cap, marks.get(cap, ())) for cap in sorted({*powers, *marks})]


def percentile_marks(sizes: Ints) -> dict[int, tuple[str, ...]]:
    """The caps that are a percentile (the least that covers so many percent) or the maximum."""
    ordered = np.sort(sizes)
    marks: dict[int, tuple[str, ...]] = {}
    for percent in PERCENTILES:
        value = int(ordered[-(-len(ordered) * percent // 100) - 1])
        marks[value] = (*marks.get(value, ()), f"P{percent}")
    largest = int(ordered[-1])
    marks[largest] = (*marks.get(largest, ()), "max")
    return marks


def _cap_row(sizes: Ints, cap: int, marks: tuple[str, ...]) -> CapRow:
    inside = sizes[sizes <= cap]
    empty = float((cap - inside).mean()) if len(inside) else 0.0
    return CapRow(
        cap=cap,
        marks=marks,
        covered=len(inside) / len(sizes),
        empty_slots=empty,
        empty_share=empty / cap,
    )
