"""Gather lengths: every rank learns how long the step's sequences are, and which lane owns each.

In: the sequences this lane drew. Out: a StepLengths, the same on every rank, from which all ranks
make the same plan. Sequences are numbered lane after lane. With sequences of 5 and 7 tokens on lane
0 and one of 9 on lane 1 the plan's places are 0, 1, 2, lengths 5 7 9, owners 0 0 1.

One row a sequence is gathered: its length, a checksum of its content, and how many labels count in
the main loss and at each depth. So the divisors of all loss terms come with the lengths.
"""

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.batch import Counts
from longshore.data.shard import count_targets
from longshore.data.source import TokenizedSample
from longshore.distributed.agreement import agreed, same_on_all_ranks
from longshore.distributed.collectives import broadcast_over_lane, gather_rows
from longshore.distributed.topology import Groups
from longshore.plan.cost import Ints
from longshore.plan.types import Sequence

FIRST_LABELS = 2
"""The first column with a count of labels, after length and checksum."""


@dataclass(frozen=True, slots=True, eq=False)
class StepLengths:
    """owners: the lane of each sequence. rows: int64 (sequences, 3 + depths), see the module."""

    owners: tuple[int, ...]
    rows: Ints

    @classmethod
    def of(cls, by_lane: Seq[Tensor]) -> "StepLengths":
        """by_lane: each lane's rows."""
        owners = tuple(lane for lane, rows in enumerate(by_lane) for _ in range(len(rows)))
        return cls(owners, torch.cat(list(by_lane)).numpy())

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
    """A row for each sequence, as it is gathered; a broken sequence raises here."""
    rows = torch.tensor([_row(sample, depths) for sample in samples], dtype=torch.int64)
    return rows.reshape(-1, FIRST_LABELS + 1 + depths)


def gather_rows_of_lanes(
    mine: Tensor, groups: Groups, *, room: int, everywhere: bool
) -> list[Tensor]:
    """Each lane's rows of lengths on every rank. All ranks call it together.

    everywhere: each rank drew the sequences of its lane itself, and an error names ranks that drew
    different ones; otherwise only the first rank of a lane did, and the others pass no rows.
    room: the number of sequences a lane usually has at most; more cost one collective more.
    """
    is_source = everywhere or (groups.tp.rank() == 0 and groups.pp.rank() == 0)
    by_lane = gather_rows(mine, groups.lanes, room=room) if is_source else []
    if not everywhere:
        return _broadcast_in_lane(by_lane, groups, columns=mine.shape[1])
    with agreed(groups):
        text = str([rows.tolist() for rows in by_lane])
    same_on_all_ranks(text, groups, what="data of a lane")
    return by_lane


def _row(sample: TokenizedSample, depths: int) -> list[int]:
    checksum = 0
    for array in (sample.tokens, sample.loss_mask, *sample.fields.values()):
        checksum = zlib.crc32(array.tobytes(), checksum)
    return [sample.length, checksum, *count_targets(sample.loss_mask, depths)]


def _broadcast_in_lane(by_lane: list[Tensor], groups: Groups, *, columns: int) -> list[Tensor]:
    """What the first rank of the lane gathered, on all ranks of the lane."""
    if groups.tp.size() == groups.pp.size() == 1:
        return by_lane
    with agreed(groups):
        numbers = torch.tensor([len(rows) for rows in by_lane] or [0] * groups.lanes.size())
    broadcast_over_lane(numbers, groups)
    with agreed(groups):
        rows = _joined_rows(by_lane, numbers, columns)
    broadcast_over_lane(rows, groups)
    with agreed(groups):
        return list(torch.split(rows, numbers.tolist()))


def _joined_rows(by_lane: list[Tensor], numbers: Tensor, columns: int) -> Tensor:
    """All rows, on the first rank of the lane; elsewhere room for them."""
    if by_lane:
        return torch.cat(by_lane)
    return torch.empty(int(numbers.sum()), columns, dtype=torch.int64)
