"""Which rows a token of compressed attention sees, and which rows each pooled entry is made of.

In: the spans of sequences that a lane holds, as integers. Out: arrays. No torch, no processes.

Entry j of a sequence pools its positions j·r … j·r + r − 1, full groups only, so a sequence of n
real tokens has n // r entries. An entry belongs to the lane that holds the last position of its
group. Position p sees the positions p − window + 1 … p and the entries j < (p + 1) // r.

A span is a run of consecutive positions of one sequence: at CP size 1 a whole sequence, else a
chunk, whose rows follow those of its halo. The row of position p is base + p, where base is where
position 0 would lie: negative if that is far before the halo. Two whole sequences of 3 and 5
tokens, window 2, ratio 4:

    near        [0, 1) [0, 2) [1, 3) | [3, 4) [3, 5) [4, 6) [5, 7) [6, 8)
    entries       0      0      0    |   0      0      0      1      1      of the second: number 0
    entry 0     rows 3 4 5 6; where groups overlap, −1 −1 −1 −1 3 4 5 6
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import Ints
from longshore.plan.shapes import chunk_pair, ranges

Ints32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Runs of positions that a lane holds, each of one sequence; all are (spans)."""

    starts: Ints
    """The first position that the lane holds."""
    stops: Ints
    """One past the last one, padding included."""
    lengths: Ints
    """Real tokens of the whole sequence; 0 for padding."""
    bases: Ints
    """The row where position 0 lies, or would lie."""
    firsts: Ints
    """The number of the sequence's first entry among all entries of the pack."""


def whole_spans(offsets: Sequence[int], lengths: Sequence[int], ratio: int) -> Spans:
    """Spans of sequences that the lane holds whole, joined at these offsets.

    lengths: real tokens of each, and 0 for each span of padding that may follow. ratio: 0 for no
    entries.
    """
    joints = np.asarray(offsets, dtype=np.int64)
    real = np.asarray(lengths, dtype=np.int64)
    bases, rows = joints[:-1], joints[1:] - joints[:-1]
    if len(real) != len(rows) or (real > rows).any():
        raise ValueError(f"sequences of {list(lengths)} tokens do not fit the rows {rows.tolist()}")
    entries = real // ratio if ratio else np.zeros_like(real)
    return Spans(np.zeros_like(rows), rows, real, bases, np.cumsum(entries) - entries)


def chunk_spans(padded: Ints, ratio: int, *, cp_rank: int, cp_size: int, halo: int) -> Spans:
    """Spans of a lane's two chunks of each sequence, early and late, each after its halo.

    padded: rows of each whole sequence. Padding may make an entry of its own, which no real row
    sees: so what lanes exchange depends on shapes alone.
    """
    chunk, early, late = chunk_pair(padded, cp_rank, cp_size)
    starts = np.stack([early, late], axis=1).reshape(-1)
    counts = np.repeat(chunk, 2)
    halos = halo * np.arange(1, len(starts) + 1)
    entries = padded // ratio if ratio else np.zeros_like(padded)
    return Spans(
        starts=starts,
        stops=starts + counts,
        lengths=np.repeat(padded, 2),
        bases=halos + np.cumsum(counts) - counts - starts,
        firsts=np.repeat(np.cumsum(entries) - entries, 2),
    )


def halo_rows(window: int, ratio: int, *, overlap: bool) -> int:
    """Rows before a chunk that its rows see, or that entries whose groups end in it pool."""
    groups = 2 if overlap else 1
    return max(window - 1, groups * ratio - 1 if ratio else 0)


def rows_after_halos(spans: Spans, halo: int) -> Ints:
    """Indices into all halos followed by the lane's rows that put each span after its halo."""
    counts = spans.stops - spans.starts
    each = np.arange(len(counts))
    firsts = len(counts) * halo + np.cumsum(counts) - counts
    starts = np.stack([each * halo, firsts], axis=1).reshape(-1)
    return ranges(starts, np.stack([np.full_like(counts, halo), counts], axis=1).reshape(-1))


def gathered_entries(spans_of_lanes: Sequence[Spans], ratio: int) -> tuple[Ints, int]:
    """Where each entry of the pack is among those of all lanes, and how many each lane sends.

    Each lane sends the entries it owns, padded to the number of the lane that has most.
    """
    owned = [owned_entries(spans, ratio) for spans in spans_of_lanes]
    most = max(len(numbers) for numbers, _ in owned)
    total = sum(len(numbers) for numbers, _ in owned)
    order = np.zeros(total, dtype=np.int64)
    for lane, (spans, (numbers, span)) in enumerate(zip(spans_of_lanes, owned, strict=True)):
        order[spans.firsts[span] + numbers] = lane * most + np.arange(len(numbers))
    return order, most


def positions(spans: Spans) -> Ints:
    """The position of each row of the lane in its sequence."""
    return ranges(spans.starts, spans.stops - spans.starts)


def near_rows(spans: Spans, window: int) -> tuple[Ints32, Ints32]:
    """For each row of the lane, the first row that it sees and one past the last."""
    position = positions(spans)
    bases = _by_row(spans, spans.bases)
    first, stop = bases + np.maximum(position - (window - 1), 0), bases + position + 1
    return first.astype(np.int32), stop.astype(np.int32)


def visible_entries(spans: Spans, ratio: int) -> tuple[Ints32, Ints32]:
    """For each row of the lane, the first entry of its sequence, and how many of them it may see.

    A row of padding sees no more of them than its sequence's last real row.
    """
    firsts = _by_row(spans, spans.firsts)
    if not ratio:
        return np.zeros_like(firsts, dtype=np.int32), np.zeros_like(firsts, dtype=np.int32)
    counts = np.minimum((positions(spans) + 1) // ratio, _by_row(spans, spans.lengths // ratio))
    return firsts.astype(np.int32), counts.astype(np.int32)


def owned_entries(spans: Spans, ratio: int) -> tuple[Ints, Ints]:
    """The number, in its sequence, of each entry that the lane owns, and its span."""
    if not ratio:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    first = spans.starts // ratio
    counts = np.maximum(np.minimum(spans.stops, spans.lengths) // ratio - first, 0)
    return ranges(first, counts), np.repeat(np.arange(len(first)), counts)


def pooled_rows(spans: Spans, ratio: int, *, overlap: bool) -> Ints32:
    """The rows of each owned entry: (entries, ratio), or with overlap (entries, 2·ratio).

    With overlap those of the group before come first, −1 where there is none.
    """
    numbers, span = owned_entries(spans, ratio)
    before = ratio if overlap else 0
    pooled = numbers[:, None] * ratio + np.arange(-before, ratio)
    rows = np.where(pooled >= 0, spans.bases[span][:, None] + pooled, -1)
    return rows.astype(np.int32)


def _by_row(spans: Spans, values: Ints) -> Ints:
    repeated: Ints = np.repeat(values, spans.stops - spans.starts)
    return repeated
