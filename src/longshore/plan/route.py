"""Who sends what to whom, for a whole step.

In: a plan and, for each of its sequences, the lane that owns it. Out: the transfers that bring
every lane the shards it holds.

A pack of CP size k cuts a sequence, padded to a multiple of 2·k, into 2·k chunks, and lane r of the
group holds chunks r and 2·k−1−r. At CP size 2 a sequence of 7 tokens is padded to 8 and cut into
chunks of 2: the first lane holds tokens 0, 1 and 6 (and the padding), the second 2, 3, 4 and 5.
Owned by lane 1 and packed on lanes 0 and 1 it makes two transfers, 1 → 0 with 3 real tokens and
1 → 1 with 4. Padding is never sent.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import index

import numpy as np

from longshore.plan.cost import Ints
from longshore.plan.shapes import padded_length, padded_lengths, spans
from longshore.plan.types import Plan


def chunk_ranges(length: int, cp_rank: int, cp_size: int) -> list[tuple[int, int]]:
    """The real tokens of a sequence that one lane of a CP group holds, as rising (start, stop).

    Chunks that are padding alone are left out. Policy `padded` cuts by the longest instead: there
    plan/shapes.py:spans says which.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(
            f"cp_rank is {cp_rank}; it must be between 0 and cp_size − 1 ({cp_size - 1})"
        )
    if cp_size == 1:
        return [(0, length)]
    chunk = padded_length(length, cp_size) // (2 * cp_size)
    starts = (cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk)
    return [(start, min(start + chunk, length)) for start in starts if start < length]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A lane's shard of one sequence, on its way from the sequence's owner.

    `chunk_ranges(length, cp_rank, cp_size)` says which tokens.
    """

    sequence: int
    """Its place in the plan."""
    round: int
    """The round in which it is used."""
    source: int
    """The lane that owns the sequence."""
    destination: int
    """The lane that holds the shard."""
    cp_rank: int
    """The destination's place in the CP group."""
    cp_size: int
    """The size of the group."""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """All transfers of a step, by round, then pack, then place in the pack, then lane.

    A lane's own sequences are listed too (source = destination), and so are shards without a real
    token: a sequence at CP size k always makes k transfers. `tokens[i]` counts the real tokens of
    transfers[i]; `pairs` holds the transfers of each (source, destination) in the same order.
    """

    lanes: int
    transfers: tuple[Transfer, ...]
    tokens: Ints
    pairs: Mapping[tuple[int, int], tuple[Transfer, ...]]

    def between(self, source: int, destination: int) -> tuple[Transfer, ...]:
        return self.pairs.get((source, destination), ())

    def sends(self, lane: int) -> dict[int, tuple[Transfer, ...]]:
        """What a lane sends, by destination."""
        return {b: sent for b in range(self.lanes) if (sent := self.between(lane, b))}

    def receives(self, lane: int) -> dict[int, tuple[Transfer, ...]]:
        """What a lane receives, by source."""
        return {a: sent for a in range(self.lanes) if (sent := self.between(a, lane))}

    def send_tokens(self) -> Ints:
        """Real tokens by (source, destination)."""
        matrix = np.zeros((self.lanes, self.lanes), dtype=np.int64)
        ends = [(transfer.source, transfer.destination) for transfer in self.transfers]
        source, destination = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        np.add.at(matrix, (source, destination), self.tokens)
        return matrix

    def receive_tokens(self) -> Ints:
        """Real tokens by (destination, source)."""
        return self.send_tokens().T


def route(plan: Plan, owners: Seq[int]) -> Routes:
    """The transfers of a step; `owners[i]` is the lane that owns plan.sequences[i]."""
    lanes = plan.setting.lanes
    _check_owners(owners, sequences=len(plan.sequences), lanes=lanes)
    transfers = tuple(
        Transfer(sequence, number, int(owners[sequence]), lane, cp_rank, pack.cp_size)
        for number, pack in plan.packs()
        for sequence in pack.sequences
        for cp_rank, lane in enumerate(pack.lanes)
    )
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in transfers:
        pairs.setdefault((transfer.source, transfer.destination), []).append(transfer)
    return Routes(
        lanes=lanes,
        transfers=transfers,
        tokens=_real_tokens(plan, transfers),
        pairs={pair: tuple(shards) for pair, shards in pairs.items()},
    )


def _check_owners(owners: Seq[int], *, sequences: int, lanes: int) -> None:
    if len(owners) != sequences:
        raise ValueError(f"there are {len(owners)} owners for {sequences} sequences; give one each")
    for sequence, owner in enumerate(owners):
        try:
            inside = 0 <= index(owner) < lanes and not isinstance(owner, bool)
        except TypeError:
            inside = False
        if not inside:
            raise ValueError(
                f"sequence {sequence} is owned by {owner!r}, which is not a lane; "
                f"an owner is an integer from 0 to {lanes - 1}"
            )


def _real_tokens(plan: Plan, transfers: Seq[Transfer]) -> Ints:
    """Real tokens of each transfer."""
    rows = [(plan.sequences[t.sequence].length, t.cp_rank, t.cp_size) for t in transfers]
    lengths, rank, size = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    starts, stops = spans(lengths, padded_lengths(plan, lengths, size), cp_rank=rank, cp_size=size)
    tokens: Ints = (stops - starts).sum(axis=1)
    return tokens
