"""Batches: which sequences each step takes. Each epoch has its own shuffle, cut into batches.

In: all lengths, a seed and the size of a global batch. Out: for every step the indices of its
sequences. Nothing depends on lanes, ranks or what was read before, so a run resumes at any step, on
any number of lanes.

Lengths 5 1 4 2 by 6 tokens, unshuffled: the steps are (0, 1) and (2, 3). By 3 sequences they are
(0, 1, 2) and (3,): a short last step is kept, so that an epoch has every sequence exactly once.

Sequences that belong together, such as the chosen and the rejected one of a pair, are a group: all
of a group are in one step. With groups 7 8 7 8 and 2 sequences a step, the steps are (0, 2) and
(1, 3). Whole groups are shuffled, and a step has as many as come closest to its size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import Ints

ORDER = "splitmix64"
"""The shuffle's name in a checkpoint; early checkpoints have NumPy's shuffle, and no name."""
GAMMA = 0x9E3779B97F4A7C15
LIMIT = 2**64
BLOCK = 1 << 16
"""Numbers computed at a time, so that temporary arrays stay small."""


def shuffled(size: int, *key: int) -> Ints:
    """A permutation of 0 … size − 1 that depends on the size and the key (seed, epoch, …) alone.

    It is the same on every machine and with every NumPy. Resumed runs rely on it, so it must never
    change. Index i gets the i-th number of SplitMix64, whose state begins with a hash of the key;
    the number's last bits, as many as the largest index needs, are replaced by the index; the
    numbers are sorted, and their last bits are the order. No two numbers are equal, so every
    sorting algorithm gives the same. With 4 indices and key (0, 0) the numbers begin 1956…, a329…,
    88e8… and 5c9e…: the order is 0 3 2 1. 10⁸ indices take 0.8 GB.
    """
    last_bits = np.uint64((1 << max(size - 1, 0).bit_length()) - 1)
    numbers = _numbers(size, _state(key), last_bits)
    numbers.sort()
    numbers &= last_bits
    return numbers.view(np.int64)


def _state(key: tuple[int, ...]) -> int:
    state = len(key)
    for part in key:
        if not 0 <= part < LIMIT:
            raise ValueError(
                f"the key of a shuffle (seed, epoch, …) has {part}; it must be from 0 to 2⁶⁴ − 1"
            )
        state = int(_mix(np.array([(state + GAMMA) % LIMIT ^ part], dtype=np.uint64))[0])
    return state


def _numbers(size: int, state: int, last_bits: np.uint64) -> NDArray[np.uint64]:
    """For each index its random number, with the index as its last bits."""
    numbers = np.empty(size, dtype=np.uint64)
    for first in range(0, size, BLOCK):
        indices = np.arange(first, min(first + BLOCK, size), dtype=np.uint64)
        block = (indices + np.uint64(1)) * np.uint64(GAMMA) + np.uint64(state)
        numbers[first : first + BLOCK] = _mix(block) & ~last_bits | indices
    return numbers


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A global batch: a number of sequences, or as many as come closest to a number of tokens.

    By tokens, a step ends with the sequence that reaches the number, or with the one before where
    that total is closer; a step always has at least one sequence.
    """

    unit: str
    amount: int

    def __post_init__(self) -> None:
        if self.unit not in ("sequences", "tokens"):
            raise ValueError(f"a batch is counted in sequences or tokens, not in {self.unit!r}")
        if self.amount < 1:
            raise ValueError(f"the batch is {self.amount} {self.unit}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a step: its epoch, its number in the epoch, and its number in the run."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0

    @property
    def following(self) -> "Place":
        """The place of the next step; after the last step of an epoch, still with that epoch."""
        return Place(self.epoch, self.step_in_epoch + 1, self.step + 1)


class Batches:
    """The steps of all epochs of one source."""

    def __init__(
        self,
        lengths: Ints,
        size: BatchSize,
        *,
        seed: int,
        shuffle: bool = True,
        groups: Ints | None = None,
    ) -> None:
        """groups: one number for each sequence, the same for those that share a step."""
        if not len(lengths):
            raise ValueError("the source has no sequences, so there is nothing to train on")
        self.groups = None if groups is None else _by_group(groups)
        self.lengths = lengths
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._cuts = [0]

    def from_place(self, place: Place) -> Iterator[tuple[Place, Ints]]:
        """All steps from a place on, without end: the place and the indices of the sequences."""
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
        count = len(self.lengths) if self.groups is None else len(self.groups[1])
        order = shuffled(count, self.seed, epoch) if self.shuffle else np.arange(count)
        if self.groups is not None:
            self._order, self._cuts = self._open_groups(order, *self.groups)
        elif self.size.unit == "sequences":
            self._order, self._cuts = order, [*range(0, count, self.size.amount), count]
        else:
            self._order, self._cuts = order, _cuts_by_weight(self.lengths[order], self.size.amount)
        self._epoch = epoch

    def _open_groups(self, order: Ints, members: Ints, sizes: Ints) -> tuple[Ints, list[int]]:
        """All sequences in the order of their groups, and where each step begins."""
        starts, sizes = (np.cumsum(sizes) - sizes)[order], sizes[order]
        ends = np.cumsum(sizes)
        within = np.arange(len(members)) - np.repeat(ends - sizes, sizes)
        sequences = members[np.repeat(starts, sizes) + within]
        weights = sizes
        if self.size.unit == "tokens":
            weights = np.add.reduceat(self.lengths[sequences], ends - sizes)
        cuts = _cuts_by_weight(weights, self.size.amount)
        return sequences, [0, *ends[np.array(cuts[1:]) - 1].tolist()]


def _by_group(groups: Ints) -> tuple[Ints, Ints]:
    """The sequences, those of a group next to each other, and how many each group has.

    Groups are in the order in which they first occur.
    """
    _, first, index = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.argsort(rank[index], kind="stable"), np.bincount(rank[index])


def _cuts_by_weight(weights: Ints, amount: int) -> list[int]:
    """Steps whose weights come closest to the amount."""
    count, ends = len(weights), np.cumsum(weights)
    cuts = [0]
    while cuts[-1] < count:
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        reached = int(np.searchsorted(ends, before + amount))
        if reached >= count:
            cuts.append(count)
            continue
        over = int(ends[reached]) - before - amount
        under = before + amount - int(ends[reached - 1])
        is_closer_before = reached > cuts[-1] and under < over
        cuts.append(reached if is_closer_before else reached + 1)
    return cuts
