"""Who sends what to whom, for a whole step.

In: a plan and, for each of its sequences, the lane that owns it. Out: the transfers that bring
every lane the shards it holds.

A pack of CP size k cuts a sequence, padded to a multiple of 2·k, into 2·k chunks, and lane r of the
group holds chunks r and 2·k−1−r. At CP size 2 a sequence of 7 tokens is padded to 8 and cut into
chunks of 2: the first lane holds tokens 0, 1 and 6 (and the padding), the second 2, 3, 4 and 5.
Owned by lane 1 and packed on lanes 0 and 1 it makes two transfers, 1 → 0 with 3 real tokens and
1 → 1 with 4. Padding is never sent.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import index

from longshore.plan.types import Plan


@dataclass(frozen=True, slots=True)
class Transfer:
    """A lane's shard of one sequence, on its way from the sequence's owner."""

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


def route(plan: Plan, owners: Seq[int]) -> dict[tuple[int, int], tuple[Transfer, ...]]:
    """The transfers of a step by (source, destination); plan.sequences[i] is owned by owners[i].

    Those of a pair are ordered by round, then pack, then place in the pack. A lane's own sequences
    are listed too (source = destination), and so are shards without a real token: a sequence at CP
    size k always makes k transfers.
    """
    _check_owners(owners, sequences=len(plan.sequences), lanes=plan.setting.lanes)
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    for number, pack in plan.packs():
        for sequence in pack.sequences:
            source = int(owners[sequence])
            for cp_rank, lane in enumerate(pack.lanes):
                transfer = Transfer(sequence, number, source, lane, cp_rank, pack.cp_size)
                pairs.setdefault((source, lane), []).append(transfer)
    return {pair: tuple(transfers) for pair, transfers in pairs.items()}


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
