"""CUDA graphs: how many micro-batches a cap on sequences covers, and what its padding costs.

In: plans. Out: one row for each candidate cap. A graph replays one shape, so the boundaries of a
micro-batch's sequences are padded to cap + 1 entries by repeating the last; a micro-batch with more
sequences than the cap runs without the graph. The number of tokens is fixed too, to the capacity:
the padding that fills a lane up to it is one more sequence for every kernel.

A lane of capacity 8 with sequences of 3 and 2 tokens counts 3: they and 3 tokens of padding. One
with 5 and 3 tokens is full and counts 2.

Micro-batches of 1, 1, 2 and 5 sequences: cap 2 covers 3 of 4, and of its 3 · 2 slots 2 stay empty,
0.67 on average.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longshore.plan.shapes import usable_capacity
from longshore.plan.types import Plan

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


def micro_batch_sizes(plan: Plan) -> Ints:
    """Sequences of each micro-batch that has any, its padding included as one."""
    lanes = plan.setting.lanes
    change = np.zeros((2, len(plan.rounds), lanes + 1), dtype=np.int64)
    for number, pack in plan.packs():
        more = (len(pack.sequences), pack.tokens_per_lane)
        change[:, number, pack.first_lane] += more
        change[:, number, pack.first_lane + pack.cp_size] -= more
    sizes, tokens = np.cumsum(change, axis=2)[:, :, :lanes].reshape(2, -1)
    most = usable_capacity(plan.setting.capacity, plan.setting.align)
    with_padding: Ints = sizes + (tokens < most)
    return with_padding[sizes > 0]


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
