"""What ranks issue: every collective and message, recorded, and compared over the ranks.

In: a block of a step on every rank. Out: each rank's operations in the order in which it issued
them, FSDP's and the pipeline's as well as ours, or an error that names ranks and operations.

Every function of torch.distributed ends in an operator of the namespace c10d. `recorded` puts a
kernel of its own before these operators while its block runs: it lists the call and goes on. So it
sees all threads, backward on a GPU included, compiled code and code that is not ours, and changes
nothing else. It sees neither the group of one rank, in which nothing is sent, nor receives from any
source.

`check_recordings` runs the recordings of all ranks against each other, without processes. Every
rank is at one place of its recording. A collective blocks until all its ranks are at it. Messages
that were issued together block until each is matched: between two ranks the first send meets the
first receive, whatever they carry, as NCCL does it without tags. That is stricter than the
executor, which does not wait for its sends: what passes here passes there.

    rank 0: send 0 → 1, then all_reduce (0, 1)        rank 1: all_reduce (0, 1), then receive 0 → 1
    DeadlockError: rank 0 waits at its operation 0 for rank 1, which waits at its own
"""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.distributed.agreement import agreed
from longshore.distributed.topology import Groups

KINDS = {
    "_allgather_base_": "gather",
    "allgather_": "gather",
    "allgather_coalesced_": "gather",
    "allgather_into_tensor_coalesced_": "gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce_to_one",
    "gather_": "gather_to_one",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv_": "receive",
}
"""Operators of c10d, as errors name them."""
BACKGROUND = "longshore-"
"""How the names of our background threads begin, which use groups of their own."""
SHOWN = 8
"""Ranks that an error lists."""


class Operation(NamedTuple):
    """One collective or message of a rank."""

    kind: str
    """A value of KINDS."""
    group: tuple[int, ...]
    """The ranks of the collective; the sender and the receiver of a message."""
    bytes: int
    """Of one rank's part, alike on all ranks; that a rank receives from others in an all_to_all."""
    where: str
    """What the rank did then, the same on all ranks of a collective; a message's tag."""
    sends: tuple[int, ...] = ()
    """Bytes for each rank of an all_to_all."""
    receives: tuple[int, ...] = ()
    """Bytes from each rank of an all_to_all."""
    batch: int = 0
    """Of a message: those of a rank with one number, above 0, are issued together."""

    def __str__(self) -> str:
        ranks = " → ".join(map(str, self.group)) if self.batch else f"{self.group}"
        where = f" in {self.where}" if self.where else ""
        return f"{self.kind} {ranks} of {self.bytes:,} bytes{where}"


@dataclass(slots=True, eq=False)
class Recording:
    """What this process issued so far, background threads left out."""

    operations: list[Operation] = field(default_factory=list)
    where: str = ""
    marks: int = 1

    def note(self, kind: str, args: Sequence[Any]) -> None:
        group = _group_of(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1 or threading.current_thread().name.startswith(BACKGROUND):
            return
        amount = min(sum(t.nbytes for t in ts) for arg in args if (ts := _tensors(arg)))
        operation = Operation(kind, ranks, amount, self.where)
        if kind in ("send", "receive"):
            me, peer, tag = dist.get_rank(), ranks[args[2]], args[3]
            pair = (me, peer) if kind == "send" else (peer, me)
            operation = Operation(kind, pair, amount, f"message {tag}", batch=self.marks)
        elif kind == "all_to_all":
            receives, sends = _parts(args[0], args[3:4], ranks), _parts(args[1], args[4:5], ranks)
            others = sum(receives) - receives[group.rank()]
            operation = Operation(kind, ranks, others, self.where, sends, receives)
        self.operations.append(operation)


def _group_of(args: Sequence[Any]) -> ProcessGroup:
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    group: ProcessGroup = ProcessGroup.unbox(boxed)
    return group


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
_recordings: list[Recording] = []


@contextmanager
def recorded() -> Iterator[Recording]:
    """Lists what this process issues in the block; blocks may be nested."""
    recording = Recording()
    library = torch.library.Library("c10d", "IMPL") if not _recordings else None
    for name, kind in KINDS.items() if library is not None else ():
        kernel = partial(_note_and_go_on, getattr(torch.ops.c10d, name).default, kind)
        library.impl(name, kernel, "Autograd", with_keyset=True)
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings.remove(recording)
        del library  # the kernels go with it


def _note_and_go_on(
    operator: Any,  # noqa: ANN401
    kind: str,
    keys: Any,  # noqa: ANN401
    *args: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    for recording in _recordings:
        recording.note(kind, args)
    return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


def mark(where: str) -> None:
    """Says what this rank does from here on; messages between two marks are issued together."""
    for recording in _recordings:
        recording.where = where
        recording.marks += 1


@contextmanager
def compared(groups: Groups) -> Iterator[None]:
    """Records the block on all ranks and checks the recordings; all ranks fail alike."""
    with recorded() as recording:
        yield
    world = groups.world
    every: list[Any] | None = [None] * world.size() if world.rank() == 0 else None
    dist.gather_object(recording.operations, every, group=world, group_dst=0)
    with agreed(groups):
        if every is not None:
            check_recordings(every)


class DeadlockError(ValueError):
    """Ranks wait for each other forever."""


class MismatchError(ValueError):
    """Ranks meet in operations that are not the same."""


def check_recordings(recordings: Sequence[Sequence[Operation]]) -> None:
    """Raises unless all ranks reach the end of their recordings, in operations that fit."""
    _Run(recordings).to_the_end()


class _Run:
    """Where every rank is."""

    def __init__(self, recordings: Sequence[Sequence[Operation]]) -> None:
        self.recordings = recordings
        self.places = [0] * len(recordings)
        self.ready = list(range(len(recordings)))
        # The ranks that are at a collective of each group.
        self.arrived: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # Of each pair of ranks, the sends or the receives that are not matched yet: their ranks
        # and places.
        self.open: dict[tuple[int, ...], deque[tuple[int, int]]] = defaultdict(deque)
        # Of each rank, the messages of its batch that are not matched yet, and its next place.
        self.unmatched = [0] * len(recordings)
        self.after = [0] * len(recordings)

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
        """Lets a rank issue what is at its place."""
        place, operations = self.places[rank], self.recordings[rank]
        if place == len(operations):
            return
        batch = operations[place].batch
        if not batch:
            self._arrive(rank, operations[place].group)
            return
        stop = place + 1
        while stop < len(operations) and operations[stop].batch == batch:
            stop += 1
        self.unmatched[rank], self.after[rank] = stop - place, stop
        for each in range(place, stop):
            self._post(rank, each)

    def _arrive(self, rank: int, group: tuple[int, ...]) -> None:
        members = self.arrived[group]
        members.append(rank)
        self._compare(members[0], self.places[members[0]], rank, self.places[rank])
        if len(members) < len(group):
            return
        if self._at(rank).kind == "all_to_all":
            for one in members:
                for other in members:
                    sent = self._at(one).sends[group.index(other)]
                    if sent != (expected := self._at(other).receives[group.index(one)]):
                        raise MismatchError(
                            f"rank {one} sends {sent:,} bytes to rank {other}, which expects "
                            f"{expected:,}: {self._named(one, self.places[one])}; "
                            f"{self._named(other, self.places[other])}"
                        )
        del self.arrived[group]
        for member in members:
            self.places[member] += 1
        self.ready += members

    def _post(self, rank: int, place: int) -> None:
        """Matches a message with the oldest one that its partner has issued, or keeps it."""
        message = self.recordings[rank][place]
        waiting = self.open[message.group]
        if not waiting or waiting[0][0] == rank:
            waiting.append((rank, place))
            return
        other, other_place = waiting.popleft()
        self._compare(other, other_place, rank, place)
        for side in (other, rank):
            self.unmatched[side] -= 1
            if not self.unmatched[side]:
                self.places[side] = self.after[side]
                self.ready.append(side)

    def _compare(self, first: int, first_place: int, second: int, second_place: int) -> None:
        one, other = self.recordings[first][first_place], self.recordings[second][second_place]
        same = one.where == other.where and (one.kind == other.kind or (one.batch and other.batch))
        # Ranks' totals of an all_to_all may differ; its parts are compared once all are at it.
        if not same or (one.bytes != other.bytes and one.kind != "all_to_all"):
            raise MismatchError(
                "two ranks meet in operations that differ: "
                f"{self._named(first, first_place)}; {self._named(second, second_place)}"
            )

    def _at(self, rank: int) -> Operation:
        return self.recordings[rank][self.places[rank]]

    def _named(self, rank: int, place: int) -> str:
        return f"rank {rank} at its operation {place}: {self.recordings[rank][place]}"
