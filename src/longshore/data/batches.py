"""Which sequences each step takes: a fresh order for every epoch, cut into global batches.

In: all lengths, a seed and the size of a batch. Out: for every step the places of its sequences.
Nothing depends on lanes, ranks or what was read before, so a run resumes anywhere, on any number of
lanes.

Lengths 5 1 4 2 by 6 tokens, unshuffled: the steps are (0, 1) and (2, 3). By 3 sequences they are
(0, 1, 2) and (3,): a short last step is kept, so that an epoch has every sequence exactly once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longshore.data.order import shuffled
from longshore.plan.cost import Ints


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A global batch: a number of sequences, or so many that their tokens come up to a number.

    By tokens, a step ends with the sequence that reaches the number, if that leaves it nearer to it
    than ending before; it always has one sequence.
    """

    unit: str
    amount: int

    def __post_init__(self) -> None:
        if self.unit not in ("sequences", "tokens"):
            raise ValueError(f"a batch is counted in sequences or tokens, not in {self.unit!r}")
        if self.amount < 1:
            raise ValueError(f"a batch of {self.amount} {self.unit}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class Place:
    """The next step to take: its epoch, its number in the epoch, and its number in the run."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0

    @property
    def following(self) -> "Place":
        """The place after this; past an epoch's last step it still names that epoch."""
        return Place(self.epoch, self.step_in_epoch + 1, self.step + 1)


class Batches:
    """The steps of all epochs of one source."""

    def __init__(self, lengths: Ints, size: BatchSize, *, seed: int, shuffle: bool = True) -> None:
        if not len(lengths):
            raise ValueError("the source has no sequences, so there is nothing to train on")
        self.lengths = lengths
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._cuts = [0]

    def from_place(self, place: Place) -> Iterator[tuple[Place, Ints]]:
        """Every step from a place on, without end: where it stands, and its sequences."""
        while True:
            self._open(place.epoch)
            if place.step_in_epoch >= self.steps():
                place = Place(place.epoch + 1, 0, place.step)
                continue
            first, stop = self._cuts[place.step_in_epoch : place.step_in_epoch + 2]
            yield place, self._order[first:stop]
            place = place.following

    def steps(self, epoch: int | None = None) -> int:
        """Steps of an epoch; they differ between epochs where batches are counted in tokens."""
        if epoch is not None:
            self._open(epoch)
        return len(self._cuts) - 1

    def _open(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        count = len(self.lengths)
        self._order = shuffled(count, self.seed, epoch) if self.shuffle else np.arange(count)
        self._cuts = _cuts(self.lengths[self._order], self.size)
        self._epoch = epoch


def _cuts(lengths: Ints, size: BatchSize) -> list[int]:
    """Where steps begin, and the end."""
    count = len(lengths)
    if size.unit == "sequences":
        return [*range(0, count, size.amount), count]
    ends = np.cumsum(lengths)
    cuts = [0]
    while cuts[-1] < count:
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        reached = int(np.searchsorted(ends, before + size.amount))
        if reached >= count:
            cuts.append(count)
            continue
        over, under = int(ends[reached]) - before - size.amount, 0
        if reached > cuts[-1]:
            under = before + size.amount - int(ends[reached - 1])
        stop = reached if reached > cuts[-1] and under < over else reached + 1
        cuts.append(stop)
    return cuts
