"""Collectives, differentiable for activations and plain for the rest; errors raised on all ranks.

In: this rank's tensor and a process group. Out: the result over all ranks of the group. Sums are
plain sums; nothing is averaged. Every rank of the group must call, and must run the backward. Rows
are sent as bytes, so every dtype works; only sums need a dtype that the backend can add.

Two ranks with shards [1, 2] and [3, 4]: `gather` gives both [1, 2, 3, 4], and their gradients
[a, b, c, d] and [e, f, g, h] come back summed and scattered, [a+e, b+f] and [c+g, d+h];
`reduce_scatter` is the reverse. `all_to_all` with sends [0, 2] on the first rank and [1, 1] on the
second gives them [3] and [1, 2, 4], and sends gradients back to where the rows came from.
`begin_gather(shard, group)` returns at once and its `wait()` gives [1, 2, 3, 4]; what is computed
in between runs at the same time. In a group of one rank nothing is sent.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.distributed.topology import Groups, Topology, destroy_groups, new_group_of

# torch 2.13 renamed both and warns at the old names; 2.11 has only these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(slots=True)
class Marks:
    """What this rank does now; messages between two marks are issued together."""

    where: str = ""
    count: int = 1

    def set(self, where: str) -> None:
        self.where = where
        self.count += 1


marks = Marks()
"""For recordings of collectives (recording.py), which errors name by what the rank did."""


def gather(shard: Tensor, group: ProcessGroup) -> Tensor:
    """The shards of all ranks, which have one shape, joined along dim 0 in the order of the ranks.

    Backward: reduce_scatter.
    """
    return shard if group.size() == 1 else _apply(_Gather, shard, group)


def reduce_scatter(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Rank r's part, the r-th of equal parts along dim 0, of the sum over all ranks.

    Backward: gather.
    """
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
    if group.size() == 1:
        return Begun(None, whole, whole)
    rows, ranks = whole.shape[0], group.size()
    assert rows % ranks == 0, f"{rows} rows cannot be scattered evenly over {ranks} ranks"
    sent = whole.detach().contiguous()
    part = whole.new_empty(rows // ranks, *whole.shape[1:])
    work = _reduce_scatter(part, sent, group=group, async_op=True)
    return Begun(work, part, sent)


def all_to_all(
    rows: Tensor, group: ProcessGroup, *, sends: Sequence[int], receives: Sequence[int]
) -> Tensor:
    """Sends the first sends[0] rows to rank 0, the next sends[1] to rank 1, …; zeros are allowed.

    Returns receives[0] rows from rank 0, then receives[1] from rank 1, …: what a rank expects must
    be what the other sends. Backward: the same with sends and receives swapped.
    """
    size, mine = group.size(), group.rank()
    assert len(sends) == len(receives) == size, f"{size} ranks need as many sends and receives"
    assert sum(sends) == rows.shape[0], f"sends must add up to the tensor's {rows.shape[0]} rows"
    assert min(*sends, *receives) >= 0, "none may be negative"
    assert sends[mine] == receives[mine], f"rank {mine} sends itself other rows than it expects"
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
    assert tensor.is_contiguous(), "it is written in place"
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
    assert rows.dtype == torch.int64, f"lengths and positions are int64, not {rows.dtype}"
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


LONGEST_ERROR = 16384
MOST_NAMES = 8


def on_any_rank(flags: Sequence[bool], group: ProcessGroup) -> list[bool]:
    """Which of the flags any rank has set; all ranks of the group, one for CPU tensors, call it."""
    answers: list[bool] = gather(torch.tensor([flags]), group).any(dim=0).tolist()
    return answers


class AnyRank:
    """Which flags any rank has set, exchanged over gloo, so that no host waits for its GPU.

    The main threads of all ranks construct, call and close it together.
    """

    def __init__(self, topology: Topology) -> None:
        self._group = topology.groups.world
        if topology.device.type != "cpu":
            self._group = new_group_of([range(topology.world_size)], backend="gloo")

    def __call__(self, flags: Sequence[bool]) -> list[bool]:
        return on_any_rank(flags, self._group)

    def close(self) -> None:
        destroy_groups([self._group])


def same_on_all_ranks(digest: str, groups: Groups, *, what: str = "plan") -> None:
    """Raises on every rank, naming those that differ, unless the digest is the same on all."""
    short = hashlib.sha256(digest.encode()).digest()
    row = torch.tensor([list(short)], dtype=torch.uint8, device=groups.device)
    by_digest: dict[bytes, list[int]] = {}
    for rank, received in enumerate(gather(row, groups.world).tolist()):
        by_digest.setdefault(bytes(received), []).append(rank)
    if len(by_digest) > 1:
        most, *others = sorted(by_digest.values(), key=len, reverse=True)
        raise RuntimeError(
            f"the ranks have {len(by_digest)} different versions of the {what}: {_names(most)} "
            f"against {'; against '.join(map(_names, others))}. Their inputs differ: compare data, "
            "configuration and versions on these ranks"
        )


class PeerError(RuntimeError):
    """Work failed on another rank: the error of the lowest such rank, as data.

    kind: the name of its class. errno, strerror: those of an OSError; 0 and "" for any other error.
    also: the other ranks that failed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        kind: str,
        errno: int = 0,
        strerror: str = "",
        also: tuple[int, ...] = (),
    ) -> None:
        self.rank, self.kind, self.message = rank, kind, message
        self.errno, self.strerror, self.also = errno, strerror, also
        others = f" ({_names(also)} failed too)" if also else ""
        super().__init__(f"rank {rank} failed: {kind}: {message}{others}")

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **vars(self)), ()

    def as_os_error(self) -> OSError | None:
        """The system's refusal on the other rank, if it was one."""
        return OSError(self.errno, self.strerror) if self.errno else None


@contextmanager
def agreed(groups: Groups) -> Iterator[None]:
    """Runs the block, which has no collective; if it fails on one rank, it raises on all.

    So no rank waits for one that is gone. The rank whose error it is raises that error itself, all
    others a PeerError that quotes it. Costs one small collective, and a second one at an error.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = error
    first = _first_error(failure, groups)
    if first is not None and first.rank == groups.world.rank():
        assert failure is not None
        raise failure
    if first is not None:
        raise first from failure


def _first_error(error: BaseException | None, groups: Groups) -> PeerError | None:
    """The error of the lowest rank that has one; None if no rank has one."""
    text = b"" if error is None else _as_json(error)
    length = -1 if error is None else len(text)
    mine = torch.tensor([length], dtype=torch.int64, device=groups.device)
    lengths: list[int] = gather(mine, groups.world).tolist()
    failed = [rank for rank, length in enumerate(lengths) if length >= 0]
    if not failed:
        return None
    padded = list(text.ljust(max(lengths), b"\0"))
    row = torch.tensor([padded], dtype=torch.uint8, device=groups.device)
    first = failed[0]
    data = bytes(gather(row, groups.world)[first].tolist())[: lengths[first]]
    return PeerError(rank=first, also=tuple(failed[1:]), **json.loads(data))


def _as_json(error: BaseException) -> bytes:
    """An error as fields of PeerError, with long texts cut; failing here would hang the others."""
    try:
        message = str(error)
    except Exception as other:  # of a user's own class
        message = f"its text cannot be read ({type(other).__name__})"
    data: dict[str, Any] = {"kind": type(error).__name__, "message": _cut(message)}
    if isinstance(error, OSError) and isinstance(error.errno, int):
        data |= {"errno": error.errno, "strerror": _cut(str(error.strerror or ""))}
    return json.dumps(data, ensure_ascii=False).encode()


def _cut(text: str) -> str:
    """At most LONGEST_ERROR bytes; a file's name in it may hold bytes that are no UTF-8."""
    return text.encode(errors="backslashreplace")[:LONGEST_ERROR].decode(errors="replace")


def _names(ranks: Sequence[int]) -> str:
    """[0, 2, 3] as "ranks 0, 2 and 3"; long lists are shortened."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMES:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMES]))} and {len(ranks) - MOST_NAMES} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


Item = TypeVar("Item")


def write_on_rank_0(
    items: Iterator[Item],
    groups: Groups,
    write: Callable[[Iterator[Item]], None],
    *,
    every: int = 1,
) -> None:
    """Calls `write` on rank 0 with all items; the other ranks only produce them.

    items: as many on every rank, each made by collectives. every: items between two agreements.

    If rank 0 stopped at an error, the others would wait for it in the collectives of the next item,
    until these time out. So the ranks agree before every few items and after the last, which costs
    a small collective each time, and rank 0 takes part in all items up to there before it raises:
    with every=16 and a disk that is full at item 20, rank 0 receives items 21 to 31 without writing
    them, and all ranks raise before item 32. Rank 0 raises its error, all others a PeerError.
    """
    stream = _SharedStream(items, groups, every)
    if groups.world.rank() == 0:
        try:
            write(stream)
        except (Exception, SystemExit) as error:
            if stream.is_broken:  # by the items themselves: the ranks are not at the same place
                raise
            stream.receive_until_agreement()
            with agreed(groups):
                raise error
    for _ in stream:
        pass
    with agreed(groups):
        pass


class _SharedStream(Iterator[Item], Generic[Item]):
    """The items, with an agreement before every few of them.

    Not a generator, which a consumer's `yield from` would close at an error.
    """

    def __init__(self, items: Iterator[Item], groups: Groups, every: int) -> None:
        self._items, self._groups, self._every = items, groups, every
        self._received, self._is_done = 0, False
        self.is_broken = False
        """An item could not be produced here, or another rank has failed."""

    def __next__(self) -> Item:
        if self._is_done:
            raise StopIteration
        try:
            if self._received % self._every == 0:
                with agreed(self._groups):
                    pass
            item = next(self._items)
        except StopIteration:
            self._is_done = True
            raise
        except BaseException:
            self.is_broken = True
            raise
        self._received += 1
        return item

    def receive_until_agreement(self) -> None:
        """Takes part in the items before the next agreement, or before the one at the end."""
        while not self._is_done and self._received % self._every:
            next(self, None)
