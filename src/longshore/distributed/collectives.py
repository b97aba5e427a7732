"""Collectives: differentiable ones for activations, plain ones for everything else.

In: this rank's tensor and a process group. Out: the result over all ranks of the group. Sums are
plain sums; nothing is averaged. Every rank of the group must call, and must run the backward.

Two ranks with shards [1, 2] and [3, 4]: `gather` gives both [1, 2, 3, 4], and their gradients
[a, b, c, d] and [e, f, g, h] come back summed and scattered, [a+e, b+f] and [c+g, d+h];
`reduce_scatter` is the reverse. `all_to_all` with sends [0, 2] on the first rank and [1, 1] on the
second gives them [3] and [1, 2, 4], and sends gradients back to where the rows came from.
`begin_gather(shard, group)` returns at once and its `wait()` gives [1, 2, 3, 4]; what is computed
in between runs at the same time.

In a group of one rank nothing is sent and the tensor itself is returned. Rows are sent as bytes, so
every dtype works; only sums need a dtype that the backend can add.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.distributed.topology import Groups

# torch 2.13 renamed both and warns at the old names; 2.11 has only these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather(shard: Tensor, group: ProcessGroup) -> Tensor:
    """The shards of all ranks, which have one shape, joined along dim 0 in the order of the ranks.

    Backward: reduce_scatter.
    """
    return shard if group.size() == 1 else _apply(_Gather, shard, group)


def reduce_scatter(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Rank r's part, the r-th of equal parts along dim 0, of the sum over all ranks.

    Backward: gather.
    """
    _check_even(whole, group)
    return whole if group.size() == 1 else _apply(_ReduceScatter, whole, group)


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A collective that runs; no autograd. `wait()` must be called, once.

    On NCCL it makes the current stream wait, not the host; on gloo the host waits. Keep this object
    until then, and wait on the stream that was current at the beginning: it holds the memory that
    NCCL's own stream reads and writes. After that the current stream is behind the collective, and
    memory that was allocated on this stream can be reused on it: no record_stream is needed.
    """

    work: dist.Work | None
    """None where nothing is sent."""
    result: Tensor
    """Where the result will be."""
    sent: Tensor
    """What the collective reads until its end."""

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.result


def begin_gather(shard: Tensor, group: ProcessGroup) -> Begun:
    """As `gather`, without waiting for it and without autograd."""
    if group.size() == 1:
        return Begun(None, shard, shard)
    sent = _as_bytes(shard.detach())
    whole = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
    work = _all_gather(_as_bytes(whole), sent, group=group, async_op=True)
    return Begun(work, whole, sent)


def begin_reduce_scatter(whole: Tensor, group: ProcessGroup) -> Begun:
    """As `reduce_scatter`, without waiting for it and without autograd."""
    _check_even(whole, group)
    if group.size() == 1:
        return Begun(None, whole, whole)
    sent = whole.detach().contiguous()
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    work = _reduce_scatter(part, sent, group=group, async_op=True)
    return Begun(work, part, sent)


def _check_even(whole: Tensor, group: ProcessGroup) -> None:
    if whole.shape[0] % group.size():
        raise ValueError(
            f"{whole.shape[0]} rows cannot be scattered evenly over {group.size()} ranks; "
            "pad them to a multiple"
        )


def all_to_all(
    rows: Tensor, group: ProcessGroup, *, sends: Sequence[int], receives: Sequence[int]
) -> Tensor:
    """Sends the first sends[0] rows to rank 0, the next sends[1] to rank 1, …; zeros are allowed.

    Returns receives[0] rows from rank 0, then receives[1] from rank 1, …: what a rank expects must
    be what the other sends. Backward: the same with sends and receives swapped.
    """
    size = group.size()
    if len(sends) != size or len(receives) != size:
        raise ValueError(
            f"all_to_all over {size} ranks needs {size} sends and {size} receives; "
            f"there are {len(sends)} and {len(receives)}"
        )
    if sum(sends) != rows.shape[0] or min(*sends, *receives) < 0:
        raise ValueError(
            f"sends are {list(sends)}, receives {list(receives)}; none may be negative, and the "
            f"sends must add up to the tensor's {rows.shape[0]} rows"
        )
    mine = group.rank()
    if sends[mine] != receives[mine]:
        raise ValueError(
            f"rank {mine} sends itself {sends[mine]} rows but expects {receives[mine]}"
        )
    return rows if size == 1 else _apply(_AllToAll, rows, group, tuple(sends), tuple(receives))


def sum_over(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Overwrites `tensor` with its sum over all ranks, and returns it. No gradient."""
    if group.size() > 1:
        with torch.no_grad():
            dist.all_reduce(tensor, group=group)
    return tensor


def max_over(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Overwrites `tensor` with its maximum over all ranks, and returns it. No gradient."""
    if group.size() > 1:
        with torch.no_grad():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def broadcast(tensor: Tensor, group: ProcessGroup, *, source: int = 0) -> Tensor:
    """Overwrites `tensor` with that of the group's rank `source`, and returns it. No gradient."""
    if not tensor.is_contiguous():
        raise ValueError("broadcast writes in place and needs a contiguous tensor")
    if group.size() > 1:
        with torch.no_grad():
            dist.broadcast(_as_bytes(tensor.view(-1, 1)), group=group, group_src=source)
    return tensor


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:  # noqa: ANN401
    output: Tensor = function.apply(*args)
    return output


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return begin_gather(shard, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return begin_reduce_scatter(whole, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gather(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        group: ProcessGroup,
        sends: tuple[int, ...],
        receives: tuple[int, ...],
    ) -> Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(
            _as_bytes(received), _as_bytes(rows), list(receives), list(sends), group=group
        )
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        back = all_to_all(grad, ctx.group, sends=ctx.receives, receives=ctx.sends)
        return back, None, None, None


def gather_rows(rows: Tensor, group: ProcessGroup, *, expected: int) -> list[Tensor]:
    """Every rank's rows, int64 of shape (its own number, columns), in the order of the ranks.

    One collective while no rank has more rows than `expected`, which is the same on all ranks: each
    sends expected + 1 rows, the first with its number of rows, the rest padded. If one has more,
    all see it in these numbers, and a second collective fits the longest.

    Lengths [[5], [7]] and [[9]] with 2 expected are sent as [2 5 7] and [1 9 0].
    """
    if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] < 1 or expected < 0:
        raise ValueError(
            "gather_rows needs int64 of shape (rows, 1 or more columns) and 0 or more expected "
            f"rows; got {rows.dtype} of shape {tuple(rows.shape)} and {expected}"
        )
    sent = rows.new_zeros(expected + 1, rows.shape[1])
    sent[0, 0] = len(rows)
    fitting = rows[:expected]
    sent[1 : 1 + len(fitting)] = fitting
    gathered = gather(sent, group).view(group.size(), expected + 1, -1)
    numbers: list[int] = gathered[:, 0, 0].tolist()
    if max(numbers) > expected:
        return gather_rows(rows, group, expected=max(numbers))
    return [part[1 : 1 + number] for part, number in zip(gathered, numbers, strict=True)]


def broadcast_over_lane(tensor: Tensor, groups: Groups) -> Tensor:
    """Overwrites `tensor` with that of the first rank of its lane, over PP, then over TP."""
    if groups.tp.rank() == 0:
        broadcast(tensor, groups.pp)
    return broadcast(tensor, groups.tp)


def _as_bytes(rows: Tensor) -> Tensor:
    """The same memory, if contiguous, as uint8 of shape (rows, bytes of a row)."""
    flat = rows.contiguous().view(rows.shape[0], prod(rows.shape[1:]))
    return flat.view(torch.uint8)
