"""Shifts a sharded tensor left by one token, over a CP group, for models that only have shards.

In: a lane's shard of a pack, zigzag layout along dim 0, and the pack's boundaries over all lanes.
Out: the shard of the shifted pack, and its sum.

Each sequence is shifted on its own: a position takes what the next one of its sequence holds, and
the last real position and all padding take the fill value. Without CP, [1 2 3 | 4 5] becomes
[2 3 0 | 5 0]. With cp_size 2 a sequence t0 … t6, padded to 8, has chunks of 2; lane 0 holds
chunks 0 and 3, lane 1 chunks 1 and 2:

    lane 0   t0 t1 | t6  –   becomes   t1 t2 | 0  0     t2 came from lane 1
    lane 1   t2 t3 | t4 t5   becomes   t3 t4 | t5 t6    t6 came from lane 0

Only the first token of a chunk ever crosses, to the lane that holds the chunk before: from lane r's
early chunks to lane r − 1, from its late chunks to lane r + 1. The heads of all sequences travel in
one exchange. Backward shifts gradients right, the same way back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.distributed.collectives import all_to_all
from longshore.plan.cost import Ints
from longshore.plan.shapes import chunk_pair, ranges

Cumulative = Sequence[int] | Tensor
Scalar = bool | int | float | complex


@dataclass(frozen=True, slots=True, eq=False)
class ShiftRows:
    """What becomes of each row of one lane's shard; rows not listed take the row below."""

    rows: int
    """How many the shard has."""
    filled: Ints
    """Rows that take the fill value."""
    sent: Ints
    """Rows whose content goes to other lanes, for the first lane first."""
    received: Ints
    """Rows that take what comes, from the first lane first."""
    sends: tuple[int, ...]
    """How many rows go to each lane."""
    receives: tuple[int, ...]
    """How many rows come from each lane."""


def shift(
    shard: Tensor,
    *,
    real: Cumulative,
    padded: Cumulative,
    group: ProcessGroup | None = None,
    fill: Scalar = 0,
) -> tuple[Tensor, Tensor]:
    """Shifts a lane's shard of a pack left by one token within each sequence; differentiable.

    Returns the shifted shard and the sum of its entries, those of this lane alone. All lanes of the
    group call it together. shard: rows of tokens in the zigzag layout along dim 0. real, padded:
    cumulative lengths of the pack's sequences over all lanes, from 0, without and with padding, as
    integers or as a CPU tensor: `PackContext.real.offsets` and `PackContext.padded.offsets`. group:
    the CP group, or None where one lane holds the whole pack. fill: the value after a sequence's
    last token.
    """
    cp_rank, cp_size = (0, 1) if group is None else (group.rank(), group.size())
    rows = shift_rows(real, padded, cp_rank=cp_rank, cp_size=cp_size)
    if len(shard) != rows.rows:
        raise ValueError(
            f"the shard has {len(shard)} rows, but the padded boundaries give each of {cp_size} "
            f"lanes {rows.rows}"
        )
    shifted: Tensor = _Shift.apply(shard, Route(rows, shard.device, group), fill)  # type: ignore[no-untyped-call]
    return shifted, shifted.sum()


def shift_rows(real: Cumulative, padded: Cumulative, *, cp_rank: int, cp_size: int) -> ShiftRows:
    """What a shift by one does to the rows of a lane; numbers alone."""
    lengths, spaces = _lengths(real, padded, cp_size)
    chunk, early, late = chunk_pair(spaces, cp_rank, cp_size)
    own = spaces // cp_size
    first = np.cumsum(own) - own
    middle, end = first + chunk, first + own
    filled = (_past(first, middle, lengths - early), _past(middle, end, lengths - late))
    # A head travels if it is real: if its position is before the end of its sequence.
    before, after = cp_rank - 1, cp_rank + 1
    sent = {before: first[early < lengths], after: middle[late < lengths]}
    received = {before: end[late + chunk < lengths] - 1, after: middle[early + chunk < lengths] - 1}
    lanes = range(cp_size)
    none = np.zeros(0, dtype=np.int64)
    return ShiftRows(
        rows=int(own.sum()),
        filled=np.concatenate(filled),
        sent=np.concatenate([none, *(sent[lane] for lane in lanes if lane in sent)]),
        received=np.concatenate([none, *(received[lane] for lane in lanes if lane in received)]),
        sends=tuple(len(sent.get(lane, none)) for lane in lanes),
        receives=tuple(len(received.get(lane, none)) for lane in lanes),
    )


def shift_left(shard: Tensor, route: "Route", fill: Scalar, heads: Tensor) -> Tensor:
    """The rows below, the fill value, and the heads that came from other lanes."""
    shifted = torch.empty_like(shard, memory_format=torch.contiguous_format)
    shifted[:-1] = shard[1:]
    shifted.index_fill_(0, route.filled, fill)
    return shifted.index_copy_(0, route.received, heads)


def shift_right(grad: Tensor, route: "Route", heads: Tensor) -> Tensor:
    """The adjoint: the rows above, zeros, and the gradients of heads that other lanes took."""
    shifted = torch.empty_like(grad, memory_format=torch.contiguous_format)
    shifted[:1] = 0
    shifted[1:] = grad[:-1]
    shifted.index_fill_(0, route.not_above, 0)
    return shifted.index_copy_(0, route.sent, heads)


class Route:
    """The rows of a shift as indices on the shard's device, and the group it runs over."""

    def __init__(self, rows: ShiftRows, device: torch.device, group: ProcessGroup | None) -> None:
        self.rows, self.group = rows, group
        # The row below a filled or received row gets no gradient from it.
        below = np.concatenate([rows.filled, rows.received]) + 1
        parts = (rows.filled, rows.sent, rows.received, below[below < rows.rows])
        joined = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
        self.filled, self.sent, self.received, self.not_above = torch.split(
            joined, [len(part) for part in parts]
        )

    def exchange(self, heads: Tensor, *, is_left: bool) -> Tensor:
        """Sends heads for those of the next chunks, or gradients for those of the lane's heads."""
        if self.group is None:
            return heads
        sizes = (self.rows.sends, self.rows.receives)
        sends, receives = sizes if is_left else sizes[::-1]
        return all_to_all(heads, self.group, sends=sends, receives=receives)


class _Shift(torch.autograd.Function):
    """Shifts left with a fill value, or right without one; either is the other's backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, fill: Scalar | None) -> Tensor:  # noqa: ANN401
        ctx.route, ctx.is_left = route, fill is not None
        taken = route.sent if ctx.is_left else route.received
        heads = route.exchange(rows[taken], is_left=ctx.is_left)
        if fill is None:
            return shift_right(rows, route, heads)
        return shift_left(rows, route, fill, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        fill = None if ctx.is_left else 0
        shifted: Tensor = _Shift.apply(grad, ctx.route, fill)  # type: ignore[no-untyped-call]
        return shifted, None, None


def _past(starts: Ints, stops: Ints, left: Ints) -> Ints:
    """The rows of each piece without a next token; the sequence ends `left` rows from its start."""
    since = np.clip(starts + left - 1, starts, stops)
    return ranges(since, stops - since)


def _lengths(real: Cumulative, padded: Cumulative, cp_size: int) -> tuple[Ints, Ints]:
    """Real and padded lengths of the sequences, checked."""
    offsets = _offsets("real", real), _offsets("padded", padded)
    if len(offsets[0]) != len(offsets[1]):
        raise ValueError(
            f"there are {len(offsets[0])} real and {len(offsets[1])} padded boundaries; "
            "give both for the same sequences: one more than their number"
        )
    lengths, spaces = np.diff(offsets[0]), np.diff(offsets[1])
    if len(short := np.flatnonzero(lengths > spaces)):
        at = short[0]
        raise ValueError(
            f"sequence {at} has {lengths[at]} real tokens, but is padded to only {spaces[at]}"
        )
    step = 2 * cp_size
    if cp_size > 1 and len(odd := np.flatnonzero(spaces % step)):
        raise ValueError(
            f"sequence {odd[0]} is padded to {spaces[odd[0]]} tokens; at CP size {cp_size} it must "
            f"be a multiple of {step}"
        )
    return lengths, spaces


def _offsets(name: str, given: Cumulative) -> Ints:
    if isinstance(given, Tensor) and given.device.type != "cpu":
        raise ValueError(
            f"the {name} boundaries are on {given.device}; give them on the CPU: reading them "
            "would wait for the device"
        )
    offsets = given.numpy() if isinstance(given, Tensor) else np.asarray(given)
    if offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu":
        raise ValueError(f"the {name} boundaries must be integers in one row, starting with 0")
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"the {name} boundaries must start at 0 and never decrease; got {given}")
    return offsets.astype(np.int64)
