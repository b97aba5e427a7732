"""Sparse attention in plain torch: blocks of query rows, each against what it sees.

In and out: as ops/sparse_attention.py, without autograd. Works on any device and dtype; half
precision is computed in float32. A block lies in one span of the ranges, so its result is bitwise
the same, whatever it is packed with.

A block meets the rows near it as one slice, then its entries, MOST_ENTRIES at a time, or the chosen
ones, which are copied for each query. A running softmax joins them: from the sink s on, it has the
largest score so far, the sum of exp(score − largest) and the sum of the rows with these weights.
128 queries with window 128 meet 255 near rows; at the end of a sequence of 65,536 tokens with ratio
128 they then meet 512 entries. With 512 chosen entries of width 512, 16 queries are a block.

Backward recomputes the weights from the largest score and the sum, which are saved apart: the
rounding of their log-sum-exp would show where scores are large.

Shapes: n queries of a block, m rows that it meets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.ops.indexed_rows import add_rows_, sums_for, take_rows
from longshore.ops.products import by_rows
from longshore.ops.row_ranges import RangeBlock, RowRanges

MOST_ROWS = 128
MOST_ENTRIES = 512
"""Of a block, at a time."""
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
    """Of the rows and entries that each query sees."""
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
    place: slice | Tensor
    """Where they lie among the near rows or the entries; an index (n, m): among the entries."""
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
        if isinstance(self.place, Tensor):
            add_rows_(dentries, self.place, grad)
        else:
            (dnear if self.is_near else dentries)[self.place] += grad


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The result of forward, and what backward needs of it."""

    out: Tensor
    """(T, H, D)."""
    top: Tensor
    """(T, H): the largest score of each query, the sink included."""
    total: Tensor
    """(T, H): Σ exp(score − largest), the sink included."""
    mass: Tensor | None
    """(T, K): Σ over heads of the weight of each chosen entry."""


def forward(
    q_THD: Tensor, sinks_H: Tensor, keys: VisibleKeys, *, scale: float, needs_mass: bool
) -> Attended:
    dtype = compute_dtype(q_THD)
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
            if mass_TK is not None and isinstance(part.place, Tensor):
                # The last part: its weights are relative to the final largest score.
                mass_nk = weights_nHm.div_(total_nH[:, :, None]).sum(1)
                mass_TK[block.rows, : mass_nk.shape[1]] = mass_nk
        out_THD[block.rows] = sum_nHD.div_(total_nH[:, :, None])
        top_TH[block.rows], total_TH[block.rows] = top_nH, total_nH
    return Attended(out_THD, top_TH, total_TH, mass_TK)


def backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    sinks_H: Tensor,
    keys: VisibleKeys,
    attended: Attended,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, near, entries and sinks."""
    dtype = compute_dtype(q_THD)
    dq_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    dnear, dentries = (sums_for(x, dtype) for x in (keys.near, keys.entries))
    dsinks_H = torch.zeros_like(sinks_H, dtype=dtype)
    for block in keys.blocks():
        q_nHD = _copied(q_THD, block.rows, dtype).mul_(scale)
        grad_nHD = _copied(grad_THD, block.rows, dtype)
        top_nH, total_nH = attended.top[block.rows], attended.total[block.rows]
        mean_nH = (grad_nHD * attended.out[block.rows]).sum(2)
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
    return (
        dq_THD,
        dnear[:-1].to(keys.near.dtype),
        dentries[:-1].to(keys.entries.dtype),
        dsinks_H.to(sinks_H.dtype),
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _copied(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    return x[rows].to(dtype, copy=True, memory_format=torch.contiguous_format)


def _outside(part: slice, first_n: Tensor, stop_n: Tensor) -> Tensor:
    """(n, m): which numbers of the slice are not in [first, stop)."""
    number_m = torch.arange(part.start, part.stop, dtype=torch.int32, device=first_n.device)
    return (number_m < first_n[:, None]) | (number_m >= stop_n[:, None])
