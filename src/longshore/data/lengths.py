"""Gather lengths: every rank learns how long the step's sequences are, and who owns them.

In: the sequences this lane drew. Out: a StepLengths, the same on every rank, from which all make
the same plan. Sequences are counted lane after lane. With sequences of 5 and 7 tokens on lane 0 and
one of 9 on lane 1 the plan's places are 0, 1, 2, lengths 5 7 9, owners 0 0 1.

One row a sequence travels: its length, a checksum of its content, and how many labels count in the
main loss and at each depth. So the divisors of all loss terms come with the lengths.
"""

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.batch import Counts
from longshore.data.shard import count_targets
from longshore.data.source import TokenizedSample
from longshore.distributed.collectives import broadcast_over_lane, gather_rows, same_on_all_ranks
from longshore.distributed.topology import Groups
from longshore.plan.cost import Ints
from longshore.plan.types import Sequence

FIRST_LABELS = 2
"""The column where the counts of labels begin, behind length and checksum."""


@dataclass(frozen=True, slots=True, eq=False)
class StepLengths:
    """owners: the lane of each sequence. rows: int64 (sequences, 3 + depths), see the module."""

    owners: tuple[int, ...]
    rows: Ints

    def sequences(self) -> list[Sequence]:
        """What the planner takes; a sequence's id is its place."""
        columns = self.rows[:, [0, FIRST_LABELS]].tolist()
        return [Sequence(place, length, labels) for place, (length, labels) in enumerate(columns)]

    def counts(self) -> Counts:
        return Counts.of(self.rows[:, FIRST_LABELS:].sum(axis=0).tolist(), self.rows[:, 0].tolist())

    def places_of(self, lane: int) -> range:
        """The places of a lane's own sequences."""
        first = self.owners.index(lane) if lane in self.owners else 0
        return range(first, first + self.owners.count(lane))


def length_rows(samples: Seq[TokenizedSample], depths: int = 0) -> Tensor:
    """A row for each sequence, as they travel; a sequence that is not sound fails here."""
    rows = torch.tensor([_row(sample, depths) for sample in samples], dtype=torch.int64)
    return rows.reshape(-1, FIRST_LABELS + 1 + depths)


def gather_lengths(mine: Tensor, groups: Groups, *, room: int, everywhere: bool) -> StepLengths:
    """Brings all lanes' rows of lengths to every rank. All ranks call it together.

    With `everywhere` each rank drew the sequences of its lane itself, and ranks that drew other
    ones are named in an error; without it only the first rank of a lane did, and the others bring
    none. `room`: the number of sequences a lane usually brings at most; more cost one collective
    more.
    """
    is_source = everywhere or (groups.tp.rank() == 0 and groups.pp.rank() == 0)
    found = gather_rows(mine, groups.lanes, room=room) if is_source else []
    if everywhere:
        same_on_all_ranks(str([rows.tolist() for rows in found]), groups, what="data of a lane")
    else:
        found = _over_lane(found, groups, columns=mine.shape[1])
    owners = tuple(lane for lane, rows in enumerate(found) for _ in range(len(rows)))
    return StepLengths(owners, torch.cat(found).numpy())


def _row(sample: TokenizedSample, depths: int) -> list[int]:
    content = 0
    for array in (sample.tokens, sample.loss_mask, *sample.fields.values()):
        content = zlib.crc32(array.tobytes(), content)
    return [sample.length, content, *count_targets(sample.loss_mask, depths)]


def _over_lane(found: list[Tensor], groups: Groups, *, columns: int) -> list[Tensor]:
    """What the first rank of the lane found, on all ranks of the lane."""
    if groups.tp.size() == groups.pp.size() == 1:
        return found
    numbers = torch.tensor([len(rows) for rows in found] or [0] * groups.lanes.size())
    sizes: list[int] = broadcast_over_lane(numbers, groups).tolist()
    rows = torch.cat(found) if found else torch.empty(sum(sizes), columns, dtype=torch.int64)
    return list(torch.split(broadcast_over_lane(rows, groups), sizes))
