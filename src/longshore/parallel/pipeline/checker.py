"""Runs the traces of all ranks together and finds a deadlock, without processes.

In: one list of operations for each rank. Out: nothing, or an error that names ranks and operations.

Every rank has one queue and is at one place of it. A collective blocks until all its ranks are at
it. The messages of a batch are issued together and block until each is matched: between two ranks
the first send meets the first receive, whatever they carry, as NCCL does it without tags. That is
stricter than the executor, which does not wait for its sends: what passes here passes there. Bytes
that do not follow from the plan are not compared.

    rank 0: send (0, 1), then all_reduce (0, 1)       rank 1: all_reduce (0, 1), then receive (0, 1)
    DeadlockError: rank 0 waits for rank 1 at its operation 0, rank 1 for rank 0 at its operation 0
"""

from collections import defaultdict, deque
from collections.abc import Sequence

from longshore.parallel.pipeline.trace import ALONE, UNKNOWN, Operation

SHOWN = 8
"""Ranks that an error lists."""


class DeadlockError(ValueError):
    """Ranks wait for each other forever."""


class MismatchError(ValueError):
    """Ranks meet in operations that are not the same."""


def run_traces(traces: Sequence[Sequence[Operation]]) -> None:
    """Raises unless all ranks reach the end of their queues."""
    _Run(traces).to_the_end()


class _Run:
    """Where every rank is."""

    def __init__(self, traces: Sequence[Sequence[Operation]]) -> None:
        self.traces = traces
        self.places = [0] * len(traces)
        self.ready = list(range(len(traces)))
        # The ranks that are at a collective of each group.
        self.arrived: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # Of each pair of ranks, the sends or the receives that are not matched yet.
        self.open: dict[tuple[int, ...], deque[tuple[int, Operation]]] = defaultdict(deque)
        # Of each rank, the messages of its batch that are not matched yet, and its next place.
        self.unmatched = [0] * len(traces)
        self.after = [0] * len(traces)

    def to_the_end(self) -> None:
        while self.ready:
            self._begin(self.ready.pop())
        if any(place < len(t) for place, t in zip(self.places, self.traces, strict=True)):
            raise DeadlockError(self._stuck())

    def _begin(self, rank: int) -> None:
        """Lets a rank issue what is at its place."""
        place, operations = self.places[rank], self.traces[rank]
        if place == len(operations):
            return
        operation = operations[place]
        if operation.batch == ALONE:
            self._arrive(rank, operation)
            return
        stop = place + 1
        while stop < len(operations) and operations[stop].batch == operation.batch:
            stop += 1
        self.unmatched[rank], self.after[rank] = stop - place, stop
        for message in operations[place:stop]:
            self._post(rank, message)

    def _arrive(self, rank: int, operation: Operation) -> None:
        group = operation.group
        members = self.arrived[group]
        if members:
            first = members[0]
            other = self.traces[first][self.places[first]]
            if _identity(other) != _identity(operation):
                raise MismatchError(self._differ(first, other, rank, operation))
        members.append(rank)
        if len(members) < len(group):
            return
        if sorted(members) != sorted(group):
            raise MismatchError(f"ranks {sorted(members)} issued {operation}")
        received = sum(self.traces[member][self.places[member]].bytes for member in members)
        if operation.total not in (UNKNOWN, received):
            raise MismatchError(
                f"the ranks of {operation} receive {received:,} bytes together, not "
                f"{operation.total:,}"
            )
        del self.arrived[group]
        for member in members:
            self.places[member] += 1
        self.ready += members

    def _post(self, rank: int, message: Operation) -> None:
        """Matches a message with the oldest one that its partner has issued, or keeps it."""
        waiting = self.open[message.group]
        if not waiting or waiting[0][1].kind == message.kind:
            waiting.append((rank, message))
            return
        other_rank, other = waiting.popleft()
        if (other.what, other.bytes) != (message.what, message.bytes):
            raise MismatchError(self._differ(other_rank, other, rank, message))
        for side in (other_rank, rank):
            self.unmatched[side] -= 1
            if not self.unmatched[side]:
                self.places[side] = self.after[side]
                self.ready.append(side)

    def _differ(self, first: int, one: Operation, second: int, other: Operation) -> str:
        return (
            f"ranks {first} and {second} meet in operations that differ: rank {first} is at {one}; "
            f"rank {second} at {other}"
        )

    def _stuck(self) -> str:
        stuck = [rank for rank, t in enumerate(self.traces) if self.places[rank] < len(t)]
        lines = [f"{len(stuck)} of {len(self.traces)} ranks wait forever"]
        for rank in stuck[:SHOWN]:
            place = self.places[rank]
            operation = self.traces[rank][place]
            lines.append(f"rank {rank} at its operation {place}: {operation}")
        if len(stuck) > SHOWN:
            lines.append(f"and {len(stuck) - SHOWN} more")
        return "\n".join(lines)


def _identity(operation: Operation) -> tuple[str, str, int]:
    return operation.kind, operation.what, operation.total
