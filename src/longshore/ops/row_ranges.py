"""Which rows and which compressed entries each query of sparse attention sees.

In: sequences, a window, a ratio. Out: `RowRanges`, a table of the boundaries: on the device for
kernels, and on the host so that plain torch can divide the queries into blocks without asking the
device. A query at position p of its sequence sees the tokens max(0, p − window + 1)…p and the
entries j < (p + 1) // ratio, where entry j stands for the tokens j·ratio…j·ratio + ratio − 1.

Sequences of 5 and 2 tokens, window 3, ratio 2; the first has the entries 0 and 1, the second 2:

    row              0  1  2  3  4 | 5  6
    near_first       0  0  0  1  2 | 5  5
    near_stop        1  2  3  4  5 | 6  7
    entry_first      0  0  0  0  0 | 2  2
    entry_count      0  1  1  2  2 | 0  1

With ratio 0 there are no entries. T query rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longshore.ops.boundaries import to_device


@dataclass(frozen=True, slots=True)
class RangeBlock:
    """Query rows of one span, with all that some of them sees."""

    rows: slice
    """Of the queries."""
    near: slice
    """Rows of keys."""
    entries: slice
    """Compressed entries."""
    most_entries: int
    """The largest entry_count of its rows."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRanges:
    """What each query sees; tensors are int32 (T), on the device."""

    near_first: Tensor
    """The first row of keys that a query sees."""
    near_stop: Tensor
    """One past the last."""
    entry_first: Tensor
    """The first entry that it may see."""
    entry_count: Tensor
    """How many it may see."""
    host: NDArray[np.int32]
    """(4, T): the four again, on the host."""
    offsets: tuple[int, ...]
    """Where spans of query rows begin and end: blocks lie inside one, so no sequence's result
    depends on what it is packed with."""

    def __len__(self) -> int:
        return int(self.host.shape[1])

    @property
    def most_entries(self) -> int:
        """The largest entry_count."""
        return int(self.host[3].max(initial=0))

    def check(self, rows: int, near: int | None, entries: int) -> None:
        """Refuses ranges of another number of queries, or past the keys or entries there are.

        near: None where no keys are read.
        """
        if len(self) != rows:
            raise ValueError(f"there are {rows} queries, but ranges for {len(self)}; give as many")
        first, stop, entry, count = self.host
        last_near, last_entry = _union(first, stop).stop, _union(entry, entry + count).stop
        if near is not None and last_near > near:
            raise ValueError(f"a query sees rows up to {last_near}, but there are {near} rows")
        if last_entry > entries:
            raise ValueError(
                f"a query sees entries up to {last_entry}, but there are {entries} entries"
            )

    def blocks(self, rows_at_once: Callable[[int], int]) -> Iterator[RangeBlock]:
        """Blocks of at most rows_at_once(largest entry_count of the span) rows of a span.

        So how a span is divided depends on the span alone.
        """
        first, stop, entry, count = self.host
        for start, end in pairwise(self.offsets):
            most_rows = rows_at_once(int(count[start:end].max(initial=0)))
            for row in range(start, end, most_rows):
                rows = slice(row, min(row + most_rows, end))
                yield RangeBlock(
                    rows,
                    _union(first[rows], stop[rows]),
                    _union(entry[rows], entry[rows] + count[rows]),
                    int(count[rows].max()),
                )


def row_ranges(
    near_first: NDArray[np.integer],
    near_stop: NDArray[np.integer],
    entry_first: NDArray[np.integer],
    entry_count: NDArray[np.integer],
    *,
    offsets: Sequence[int],
    device: torch.device,
) -> RowRanges:
    """From numbers on the host, (T) each. offsets: of spans of query rows, such as sequences."""
    host = np.stack([near_first, near_stop, entry_first, entry_count]).astype(np.int32)
    if offsets[0] != 0 or offsets[-1] != host.shape[1]:
        raise ValueError(
            f"the spans go from {offsets[0]} to {offsets[-1]}, but there are {host.shape[1]} "
            "queries; they must cover all queries"
        )
    if (host < 0).any() or (host[0] > host[1]).any():
        raise ValueError("a range is negative or stops before its first; give 0 ≤ first ≤ stop")
    first, stop, entry, count = (to_device(numbers.copy(), device) for numbers in host)
    return RowRanges(first, stop, entry, count, host=host, offsets=tuple(offsets))


def _union(first: NDArray[np.int32], stop: NDArray[np.int32]) -> slice:
    """The smallest slice around all ranges that are not empty."""
    filled = first < stop
    if not filled.any():
        return slice(0, 0)
    return slice(int(first[filled].min()), int(stop[filled].max()))
