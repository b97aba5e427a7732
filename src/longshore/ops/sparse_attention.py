"""Attention over a window of rows and compressed entries, one head of keys for all queries.

In: queries (T, H, D), rows (R, D) and entries (E, D) that are keys and values at once, a logit for
each head that counts in the denominator alone (sink), and the ranges of what each query sees. Out:
(T, H, D), and if wanted the attention on each chosen entry, summed over the heads. A query with
scores 0 for two near rows 1 and 3 and one entry 4, and a sink of 0, gives (1 + 3 + 4) / 4 = 2, and
a mass of ¼ on the entry. With the entry not chosen it gives 4/3.

A query at position p of its sequence sees the tokens max(0, p − window + 1)…p and the entries
j < (p + 1) // ratio, where entry j stands for the tokens j·ratio…j·ratio + ratio − 1. Sequences of
5 and 2 tokens, window 3, ratio 2; the first has the entries 0 and 1, the second 2:

    row              0  1  2  3  4 | 5  6
    near_first       0  0  0  1  2 | 5  5
    near_stop        1  2  3  4  5 | 6  7
    entry_first      0  0  0  0  0 | 2  2
    entry_count      0  1  1  2  2 | 0  1

Plain torch takes blocks of queries: first the rows near a block, as one slice, then its entries,
MOST_ENTRIES at a time, or the chosen ones, copied for each query. A running softmax joins them, so
no T × R or T × E matrix exists at any time. A block lies in one span of the ranges, so its result
is bitwise the same, whatever it is packed with.

T queries, H heads, D width of a head, R rows, E entries, K chosen entries of a query, −1 for none;
n queries of a block, m rows that it meets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.backends import pick
from longshore.ops.boundaries import to_device
from longshore.ops.linear import by_rows


@dataclass(frozen=True, slots=True)
class RangeBlock:
    """Query rows of one span, with all that some of them sees."""

    rows: slice
    """Rows of the queries."""
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
    """Where spans of query rows begin and end: blocks lie inside one."""

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
        """Blocks of at most rows_at_once(largest entry_count of the span) rows of a span."""
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


def take_rows(x_RD: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """(…, D): a copy of the rows in this dtype, 0 for −1."""
    if not len(x_RD):
        return x_RD.new_zeros(*index.shape, x_RD.shape[1], dtype=dtype)
    rows = x_RD.index_select(0, index.clamp(min=0).flatten()).to(dtype)
    return rows.view(*index.shape, x_RD.shape[1]).masked_fill_((index < 0)[..., None], 0.0)


def sums_for(x_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """(R + 1, D) zeros for `add_rows_`: a row for each of x, and a last one that −1 adds to."""
    return x_RD.new_zeros(len(x_RD) + 1, x_RD.shape[1], dtype=dtype)


def add_rows_(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows (…, D) to those of `sums_for` that the index names, in a fixed order.

    What belongs to −1 touches no row, not even if it is NaN.
    """
    flat = torch.where(index < 0, len(sums) - 1, index).flatten()
    rows = rows.reshape(len(flat), -1)
    if sums.device.type == "cpu":
        sums.index_add_(0, flat, rows)
    else:
        # Of the two only this one sorts on a GPU, so that sums are the same in every run.
        sums.index_put_((flat.long(),), rows, accumulate=True)


MOST_ROWS = 128
MOST_ENTRIES = 512
"""Rows of a block, and entries that it meets at a time."""
MOST_COPIED = 1 << 22
"""Numbers in the copies of chosen entries for a block, unless one query already has more."""


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKeys:
    """What queries may see: rows, entries, and which of them."""

    near: Tensor
    """(R, D)."""
    entries: Tensor
    """(E, D)."""
    ranges: RowRanges
    """The rows and entries that each query sees."""
    chosen: Tensor | None
    """(T, K), or None for all entries of the range."""

    def blocks(self) -> Iterator[RangeBlock]:
        chosen, width = self.chosen, self.near.shape[1]

        def rows_at_once(entries: int) -> int:
            copied = 0 if chosen is None else min(entries, chosen.shape[1]) * width
            return max(1, min(MOST_ROWS, MOST_COPIED // max(copied, 1)))

        return self.ranges.blocks(rows_at_once)

    def parts(self, block: RangeBlock, dtype: torch.dtype) -> "Iterator[KeyPart]":
        """What the block meets: first the near rows, last the entries."""
        ranges, rows = self.ranges, block.rows
        if block.near.start < block.near.stop:
            hidden_nm = _outside(block.near, ranges.near_first[rows], ranges.near_stop[rows])
            yield KeyPart(_copied(self.near, block.near, dtype), hidden_nm, block.near)
        if self.chosen is not None:
            index_nk = self.chosen[rows, : block.most_entries]
            if index_nk.shape[1]:
                rows_nkD = take_rows(self.entries, index_nk, dtype)
                yield KeyPart(rows_nkD, index_nk < 0, index_nk)
            return
        first, count = ranges.entry_first[rows], ranges.entry_count[rows]
        for start in range(block.entries.start, block.entries.stop, MOST_ENTRIES):
            part = slice(start, min(start + MOST_ENTRIES, block.entries.stop))
            hidden_nm = _outside(part, first, first + count)
            yield KeyPart(_copied(self.entries, part, dtype), hidden_nm, part, is_near=False)


@dataclass(frozen=True, slots=True, eq=False)
class KeyPart:
    """Keys that a block meets at a time."""

    rows: Tensor
    """(m, D) for all queries of the block, or (n, m, D), for each its own."""
    hidden_nm: Tensor
    """Which of them a query does not see."""
    index: slice | Tensor
    """Their rows among the near rows or the entries; a tensor (n, m): among the entries."""
    is_near: bool = True

    def scores(self, q_nHD: Tensor) -> Tensor:
        """(n, H, m): products, also of those that are hidden."""
        if self.rows.dim() == 3:
            return (self.rows @ by_rows(q_nHD.mT)).mT
        return (q_nHD.flatten(0, 1) @ by_rows(self.rows.T)).view(*q_nHD.shape[:2], -1)

    def weighted(self, weights_nHm: Tensor) -> Tensor:
        """(n, H, D): sums of the rows."""
        if self.rows.dim() == 3:
            return weights_nHm @ self.rows
        return (weights_nHm.flatten(0, 1) @ self.rows).view(*weights_nHm.shape[:2], -1)

    def weighted_queries(self, weights_nHm: Tensor, q_nHD: Tensor) -> Tensor:
        """Sums of the queries, in the shape of the rows."""
        if self.rows.dim() == 3:
            return weights_nHm.mT @ q_nHD
        return weights_nHm.flatten(0, 1).T @ q_nHD.flatten(0, 1)

    def add_to(self, dnear: Tensor, dentries: Tensor, grad: Tensor) -> None:
        if isinstance(self.index, Tensor):
            add_rows_(dentries, self.index, grad)
        else:
            (dnear if self.is_near else dentries)[self.index] += grad


def _forward(
    q_THD: Tensor, sinks_H: Tensor, keys: VisibleKeys, *, scale: float, needs_mass: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The output, each query's largest score (T, H), Σ exp(score − largest) (T, H), and the mass.

    Both count the sink. They are saved apart: the rounding of their log-sum-exp would show where
    scores are large.
    """
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    top_TH, total_TH = (q_THD.new_empty(q_THD.shape[:2], dtype=dtype) for _ in range(2))
    mass_TK = None
    if needs_mass and keys.chosen is not None:
        mass_TK = q_THD.new_zeros(keys.chosen.shape, dtype=dtype)
    for block in keys.blocks():
        q_nHD = _copied(q_THD, block.rows, dtype).mul_(scale)
        top_nH = sinks_H.to(dtype).expand(q_nHD.shape[:2])
        total_nH, sum_nHD = torch.ones_like(top_nH), torch.zeros_like(q_nHD)
        for part in keys.parts(block, dtype):
            scores_nHm = part.scores(q_nHD).masked_fill_(part.hidden_nm[:, None], -torch.inf)
            before_nH, top_nH = top_nH, torch.maximum(top_nH, scores_nHm.amax(2))
            weights_nHm = scores_nHm.sub_(top_nH[:, :, None]).exp_()
            fading_nH = (before_nH - top_nH).exp_()
            total_nH = total_nH * fading_nH + weights_nHm.sum(2)
            sum_nHD = sum_nHD.mul_(fading_nH[:, :, None]).add_(part.weighted(weights_nHm))
            if mass_TK is not None and isinstance(part.index, Tensor):
                # The last part: its weights are relative to the final largest score.
                mass_nk = weights_nHm.div_(total_nH[:, :, None]).sum(1)
                mass_TK[block.rows, : mass_nk.shape[1]] = mass_nk
        out_THD[block.rows] = sum_nHD.div_(total_nH[:, :, None])
        top_TH[block.rows], total_TH[block.rows] = top_nH, total_nH
    return out_THD, top_TH, total_TH, mass_TK


def _backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    sinks_H: Tensor,
    keys: VisibleKeys,
    attended: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, near, entries and sinks; attended: what `_forward` returned first."""
    out_THD, top_TH, total_TH = attended
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    dq_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    dnear, dentries = (sums_for(x, dtype) for x in (keys.near, keys.entries))
    dsinks_H = torch.zeros_like(sinks_H, dtype=dtype)
    for block in keys.blocks():
        q_nHD = _copied(q_THD, block.rows, dtype).mul_(scale)
        grad_nHD = _copied(grad_THD, block.rows, dtype)
        top_nH, total_nH = top_TH[block.rows], total_TH[block.rows]
        mean_nH = (grad_nHD * out_THD[block.rows]).sum(2)
        dsinks_H -= ((sinks_H - top_nH).exp_() / total_nH).mul_(mean_nH).sum(0)
        dq_nHD = torch.zeros_like(q_nHD)
        for part in keys.parts(block, dtype):
            scores_nHm = part.scores(q_nHD).masked_fill_(part.hidden_nm[:, None], -torch.inf)
            probs_nHm = scores_nHm.sub_(top_nH[:, :, None]).exp_().div_(total_nH[:, :, None])
            dscores_nHm = part.scores(grad_nHD).sub_(mean_nH[:, :, None]).mul_(probs_nHm)
            dq_nHD += part.weighted(dscores_nHm)
            drows = part.weighted_queries(dscores_nHm, q_nHD)
            drows += part.weighted_queries(probs_nHm, grad_nHD)
            part.add_to(dnear, dentries, drows)
        dq_THD[block.rows] = dq_nHD.mul_(scale)
    dnear, dentries = dnear[:-1].to(keys.near.dtype), dentries[:-1].to(keys.entries.dtype)
    return dq_THD, dnear, dentries, dsinks_H.to(sinks_H.dtype)


def _copied(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    return x[rows].to(dtype, copy=True, memory_format=torch.contiguous_format)


def _outside(part: slice, first_n: Tensor, stop_n: Tensor) -> Tensor:
    """(n, m): which numbers of the slice are not in [first, stop)."""
    number_m = torch.arange(part.start, part.stop, dtype=torch.int32, device=first_n.device)
    return (number_m < first_n[:, None]) | (number_m >= stop_n[:, None])


def sparse_attention(
    q_THD: Tensor,
    near_RD: Tensor,
    entries_ED: Tensor,
    sinks_H: Tensor,
    *,
    ranges: RowRanges,
    scale: float,
    chosen_TK: Tensor | None = None,
    needs_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output in the dtype of q; mass_TK in float32 at least, detached, None unless needed.

    chosen: int32, as `indexer.choose` returns it: entries of the query's range, then −1 for none;
    None: a query sees all entries of its range. mass is only there with chosen entries.
    """
    _check(q_THD, near_RD, entries_ED, sinks_H, chosen_TK)
    ranges.check(len(q_THD), len(near_RD), len(entries_ED))
    return _SparseAttention.apply(
        q_THD, near_RD, entries_ED, sinks_H, chosen_TK, ranges, scale, needs_mass
    )


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        near: Tensor,
        entries: Tensor,
        sinks: Tensor,
        chosen: Tensor | None,
        ranges: RowRanges,
        scale: float,
        needs_mass: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.ranges, ctx.scale = ranges, scale
        kernels = ctx.kernels = pick("sparse attention", q, near, entries)
        options: dict[str, Any] = {"scale": scale, "needs_mass": needs_mass}
        if kernels is not None:
            out, top, mass = kernels.forward(q, sinks, near, entries, chosen, ranges, **options)
            total = None  # top is the log-sum-exp
        else:
            keys = VisibleKeys(near, entries, ranges, chosen)
            out, top, total, mass = _forward(q, sinks, keys, **options)
        ctx.save_for_backward(q, near, entries, sinks, chosen, out, top, total)
        if mass is not None:
            ctx.mark_non_differentiable(mass)
        return out, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _mass: Tensor | None) -> tuple[Tensor | None, ...]:
        q, near, entries, sinks, chosen, out, top, total = ctx.saved_tensors
        if ctx.kernels is not None:
            grads = ctx.kernels.backward(
                grad, q, sinks, near, entries, chosen, ctx.ranges, out, top, scale=ctx.scale
            )
        else:
            keys = VisibleKeys(near, entries, ctx.ranges, chosen)
            grads = _backward(grad, q, sinks, keys, (out, top, total), scale=ctx.scale)
        return *grads, None, None, None, None


def _check(q: Tensor, near: Tensor, entries: Tensor, sinks: Tensor, chosen: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, near {tuple(near.shape)}, entries {tuple(entries.shape)}"
    if not (q.dim() == 3 and near.dim() == entries.dim() == 2):
        raise ValueError(
            f"the shapes are {shapes}; q must be (rows, heads, width), the others (rows, width)"
        )
    if not q.shape[2] == near.shape[1] == entries.shape[1]:
        raise ValueError(f"the shapes are {shapes}; all must have the same width")
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks are {tuple(sinks.shape)}; there are {q.shape[1]} heads")
    if not q.dtype == near.dtype == entries.dtype:
        raise ValueError(
            f"q is {q.dtype}, near {near.dtype}, entries {entries.dtype}; give one dtype"
        )
    if chosen is not None and (chosen.dim() != 2 or len(chosen) != len(q)):
        raise ValueError(
            f"chosen is {tuple(chosen.shape)}; it must be (rows, entries) with {len(q)} rows"
        )
