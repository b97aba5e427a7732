"""What ranks issue: every collective and message, recorded, and compared over the ranks.

In: a block of a step on every rank. Out: each rank's operations in the order in which it issued
them, FSDP's and the pipeline's as well as ours, or an error that names ranks and operations.

Every function of torch.distributed ends in an operator of the namespace c10d. `recorded` puts a
kernel of its own before these operators while its block runs: it lists the call and goes on. So it
sees all threads, backward on a GPU included, compiled code and code that is not ours, and changes
nothing else. It sees neither the group of one rank, in which nothing is sent, nor receives from any
source.

    rank 0: send 0 → 1, then all_reduce (0, 1)        rank 1: all_reduce (0, 1), then receive 0 → 1
    DeadlockError: rank 0 waits at its operation 0 for rank 1, which waits at its own
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.distributed.collectives import agreed, marks
from longshore.distributed.topology import Groups

KINDS = {
    f"{name}_" if name not in ("send", "barrier") else name: kind
    for kind, names in {
        "gather": "_allgather_base allgather allgather_coalesced allgather_into_tensor_coalesced",
        "reduce_scatter": "_reduce_scatter_base reduce_scatter reduce_scatter_tensor_coalesced",
        "all_reduce": "allreduce allreduce_coalesced",
        "all_to_all": "alltoall_base alltoall",
        "broadcast": "broadcast",
        "reduce_to_one": "reduce",
        "gather_to_one": "gather",
        "scatter": "scatter",
        "barrier": "barrier",
        "send": "send",
        "receive": "recv",
    }.items()
    for name in names.split()
}
"""Operators of c10d, as errors name them."""
BACKGROUND = "longshore-"
"""How the names of our background threads begin, which use groups of their own."""
SHOWN = 8
"""Ranks that an error lists."""
Member = tuple[int, int]
"""A rank, and the place of an operation in its recording."""


class Operation(NamedTuple):
    """One collective or message of a rank."""

    kind: str
    """A value of KINDS."""
    group: tuple[int, ...]
    """The ranks of the collective; the sender and the receiver of a message."""
    bytes: int
    """Size of one rank's part, alike on all ranks; in an all_to_all what comes from other ranks."""
    where: str
    """What the rank was doing, the same on all ranks of a collective; the tag of a message."""
    sends: tuple[int, ...] = ()
    """Bytes for each rank of an all_to_all."""
    receives: tuple[int, ...] = ()
    """Bytes from each rank of an all_to_all."""
    batch: int = 0
    """Number of a message's batch: those of one number are issued together; 0 for a collective."""

    def __str__(self) -> str:
        ranks = " → ".join(map(str, self.group)) if self.batch else f"{self.group}"
        where = f" in {self.where}" if self.where else ""
        return f"{self.kind} {ranks} of {self.bytes:,} bytes{where}"


def _operation(kind: str, args: Sequence[Any]) -> Operation | None:
    """One call of an operator of c10d with these arguments; None for what is not recorded."""
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    ranks = tuple(dist.get_process_group_ranks(ProcessGroup.unbox(boxed)))
    if len(ranks) == 1 or threading.current_thread().name.startswith(BACKGROUND):
        return None
    amount = min(sum(t.nbytes for t in ts) for arg in args if (ts := _tensors(arg)))
    if kind in ("send", "receive"):
        me, peer, tag = dist.get_rank(), ranks[args[2]], args[3]
        pair = (me, peer) if kind == "send" else (peer, me)
        return Operation(kind, pair, amount, f"message {tag}", batch=marks.count)
    if kind == "all_to_all":
        receives, sends = _parts(args[0], args[3:4], ranks), _parts(args[1], args[4:5], ranks)
        others = sum(receives) - receives[ranks.index(dist.get_rank())]
        return Operation(kind, ranks, others, marks.where, sends, receives)
    return Operation(kind, ranks, amount, marks.where)


def _tensors(arg: object) -> list[Tensor]:
    if isinstance(arg, Tensor):
        return [arg]
    return [t for each in arg for t in _tensors(each)] if isinstance(arg, list | tuple) else []


def _parts(rows: Any, splits: Sequence[Any], ranks: Sequence[int]) -> tuple[int, ...]:  # noqa: ANN401
    """Bytes of each rank's part; splits: their rows, or none where the parts are equal."""
    if isinstance(rows, list):
        return tuple(part.nbytes for part in rows)
    if not splits or not splits[0]:
        return (rows.nbytes // len(ranks),) * len(ranks)
    return tuple(number * (rows.nbytes // max(1, len(rows))) for number in splits[0])


# Not a context variable: on CUDA the backward runs in a thread without it.
_recordings: list[list[Operation]] = []


@contextmanager
def recorded() -> Iterator[list[Operation]]:
    """Lists what this process issues in the block, background threads left out; may be nested."""
    recording: list[Operation] = []
    library = torch.library.Library("c10d", "IMPL")
    for name, kind in KINDS.items() if not _recordings else ():
        kernel = partial(_note_and_go_on, getattr(torch.ops.c10d, name).default, kind)
        library.impl(name, kernel, "Autograd", with_keyset=True)
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings.pop()
        del library  # the kernels go with it


def _note_and_go_on(operator: Any, kind: str, keys: Any, *args: Any) -> Any:  # noqa: ANN401
    if (operation := _operation(kind, args)) is not None:
        for recording in _recordings:
            recording.append(operation)
    # c10d has kernels for devices only: autograd's place is free. torch 2.11 to 2.13 have the name.
    return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


@contextmanager
def compared(groups: Groups) -> Iterator[None]:
    """Records the block on all ranks and checks the recordings; all ranks fail alike."""
    with recorded() as recording:
        yield
    world = groups.world
    every: list[Any] | None = [None] * world.size() if world.rank() == 0 else None
    dist.gather_object(recording, every, group=world, group_dst=0)
    with agreed(groups):
        if every is not None:
            check_recordings(every)


class DeadlockError(ValueError):
    """Ranks wait for each other forever."""


class MismatchError(ValueError):
    """Ranks meet in operations that are not the same."""


def check_recordings(recordings: Sequence[Sequence[Operation]]) -> None:
    """Raises unless all ranks reach the end of their recordings, in operations that fit.

    Runs them against each other, without processes. A collective blocks until all its ranks are at
    it. Messages that were issued together block until each is matched: between two ranks the first
    send meets the first receive, whatever they carry, as NCCL does it without tags. That is
    stricter than the executor, which does not wait for its sends: what passes here passes there.
    """
    _Run(recordings).to_the_end()


class _Run:
    """Where every rank is. A rank issues its next operation, or batch of messages, and waits."""

    def __init__(self, recordings: Sequence[Sequence[Operation]]) -> None:
        self.recordings = recordings
        self.places = [0] * len(recordings)
        self.ready = list(range(len(recordings)))
        # What each rank has issued and waits for: how many operations, and the place after them.
        self.unmet = [0] * len(recordings)
        self.after = [0] * len(recordings)
        # The members that wait in each group, and in each pair for a message.
        self.waiting: dict[tuple[bool, tuple[int, ...]], list[Member]] = defaultdict(list)

    def to_the_end(self) -> None:
        while self.ready:
            self._begin(self.ready.pop())
        stuck = [rank for rank, r in enumerate(self.recordings) if self.places[rank] < len(r)]
        if stuck:
            lines = [f"{len(stuck)} of {len(self.recordings)} ranks wait forever"]
            lines += [self._named(rank, self.places[rank]) for rank in stuck[:SHOWN]]
            more = [f"and {len(stuck) - SHOWN} more"] if len(stuck) > SHOWN else []
            raise DeadlockError("\n".join(lines + more))

    def _begin(self, rank: int) -> None:
        place, operations = self.places[rank], self.recordings[rank]
        if place == len(operations):
            return
        batch, stop = operations[place].batch, place + 1
        while batch and stop < len(operations) and operations[stop].batch == batch:
            stop += 1
        self.unmet[rank], self.after[rank] = stop - place, stop
        for each in range(place, stop):
            for member, _ in self._meet(rank, each):
                self.unmet[member] -= 1
                if not self.unmet[member]:
                    self.places[member] = self.after[member]
                    self.ready.append(member)

    def _meet(self, rank: int, place: int) -> list[Member]:
        """The ranks of an operation, and its place on each, once all have issued it."""
        operation = self.recordings[rank][place]
        waiting = self.waiting[operation.batch > 0, operation.group]
        waiting.append((rank, place))
        if not operation.batch:
            met = list(waiting) if len(waiting) == len(operation.group) else []
        else:  # messages of one side wait one behind the other
            met = [waiting[0], waiting[-1]] if waiting[0][0] != rank else []
        for member in met:
            waiting.remove(member)
            self._compare(met[0], member)
        if met and operation.kind == "all_to_all":
            self._compare_parts(sorted(met, key=lambda member: operation.group.index(member[0])))
        return met

    def _compare(self, first: Member, second: Member) -> None:
        one, other = self._at(first), self._at(second)
        same = one.where == other.where and (one.kind == other.kind or one.batch > 0)
        # Ranks receive different amounts in an all_to_all: its parts are compared.
        if not same or (one.bytes != other.bytes and one.kind != "all_to_all"):
            raise MismatchError(
                "two ranks meet in operations that differ: "
                f"{self._named(*first)}; {self._named(*second)}"
            )

    def _compare_parts(self, members: Sequence[Member]) -> None:
        """members: in the order of the group."""
        expected = zip(*(self._at(member).receives for member in members), strict=True)
        for member, wanted in zip(members, expected, strict=True):
            for other, sent, part in zip(members, self._at(member).sends, wanted, strict=True):
                if sent != part:
                    raise MismatchError(
                        f"rank {member[0]} sends {sent:,} bytes to rank {other[0]}, which expects "
                        f"{part:,}: {self._named(*member)}; {self._named(*other)}"
                    )

    def _at(self, member: Member) -> Operation:
        rank, place = member
        return self.recordings[rank][place]

    def _named(self, rank: int, place: int) -> str:
        return f"rank {rank} at its operation {place}: {self.recordings[rank][place]}"
