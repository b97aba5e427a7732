"""The best step there is for a few sequences on a few lanes, found by trying everything.

In: up to about 6 lengths, up to 4 lanes, a capacity and a profile. Out: seconds. CP sizes are
powers of two and the whole of the lanes, so groups nest.

Sync `round`: every choice of a group (or none) for every sequence gives the height of one round
with those sequences; the best step is the cheapest way to part all sequences into such rounds.

Sync `step`, where rounds cost nothing: a pack alone in its round never delays more than one that
shares it, and with larger groups first no lane waits for another. So the best step is the choice
of groups with the lowest fullest lane, where a group pays for as few packs as hold its sequences.

Lengths 8, 3 and 3 on 2 lanes of 7 tokens, one second a token: 7 seconds, the first split over both.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tests.plan.evaluator import padded, sequence_cost

from longshore.plan import CostProfile

FORBIDDEN = np.inf


@dataclass(frozen=True, slots=True)
class Tiny:
    """A problem small enough for brute force."""

    lengths: tuple[int, ...]
    lanes: int
    capacity: int
    profile: CostProfile
    sync: str
    max_sequences: int = 99
    tokenwise: float = 0.0
    """The part of the linear cost that has a maximum of its own in each round."""


@dataclass(frozen=True, slots=True)
class Group:
    first_lane: int
    cp_size: int


def groups_of(lanes: int) -> list[Group]:
    """Every aligned group of every legal size."""
    sizes = sorted({size for size in (1, 2, 4) if size <= lanes} | {lanes})
    return [Group(first, k) for k in sizes for first in range(0, lanes - k + 1, k)]


def best_time(tiny: Tiny) -> float:
    """Seconds of the fastest step; infinite if there is none."""
    if tiny.sync == "round":
        return float(_best_parting(_round_heights(tiny), tiny.profile.round)[-1])
    assert tiny.profile.round == 0
    return _best_step(tiny)


def _choices(sequences: int, options: int) -> NDArray[np.int64]:
    """Every way to give each sequence one of the options, a row each."""
    grid = np.indices((options,) * sequences, dtype=np.int64)
    return grid.reshape(sequences, -1).T


@lru_cache(maxsize=4)
def _masks(sequences: int, options: int, groups: int) -> NDArray[np.int64]:
    """For each way and group the sequences in it, as bits; options beyond the groups are none."""
    choices = _choices(sequences, options)
    bits = 1 << np.arange(sequences)
    return np.stack([((choices == g) * bits).sum(axis=1) for g in range(groups)])


def _subset_sums(values: list[float]) -> NDArray[np.float64]:
    """The sum of the values of each set of sequences, a set being a number's bits."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums, sums + value])
    return sums


def _lane_sums(tiny: Tiny, masks: NDArray[np.int64], per_mask: dict[int, NDArray]) -> NDArray:
    """Sums on each lane of what its groups hold; `per_mask` tells by CP size what a set adds."""
    total = np.zeros((tiny.lanes, masks.shape[1]))
    for group, held in zip(groups_of(tiny.lanes), masks, strict=True):
        total[group.first_lane : group.first_lane + group.cp_size] += per_mask[group.cp_size][held]
    return total


def _sizes(tiny: Tiny) -> list[int]:
    return sorted({group.cp_size for group in groups_of(tiny.lanes)})


def _costs(tiny: Tiny, cp_size: int) -> NDArray[np.float64]:
    """Seconds of each set of sequences at a CP size, packs not counted."""
    return _subset_sums([sequence_cost(tiny.profile, n, cp_size) for n in tiny.lengths])


def _tokens(tiny: Tiny, cp_size: int) -> NDArray[np.float64]:
    return _subset_sums([padded(n, cp_size) // cp_size for n in tiny.lengths])


def _round_heights(tiny: Tiny) -> NDArray[np.float64]:
    """The height of the best round that holds just the sequences of each set."""
    count = len(tiny.lengths)
    groups = len(groups_of(tiny.lanes))
    masks = _masks(count, groups + 1, groups)
    some = np.arange(1 << count) > 0
    cost = {k: _costs(tiny, k) + tiny.profile.pack * some for k in _sizes(tiny)}
    each = _lane_sums(tiny, masks, {k: _tokens(tiny, k) for k in _sizes(tiny)})
    tokens, apart = each.max(axis=0), tiny.tokenwise * tiny.profile.linear * each
    height = (_lane_sums(tiny, masks, cost) - apart).max(axis=0) + apart.max(axis=0)
    members = {k: _subset_sums([1.0] * count) for k in _sizes(tiny)}
    crowd = _lane_sums(tiny, masks, members).max(axis=0)
    height[(tokens > tiny.capacity) | (crowd > tiny.max_sequences)] = FORBIDDEN
    heights = np.full(1 << count, FORBIDDEN)
    np.minimum.at(heights, masks.sum(axis=0), height)
    return heights


def _best_parting(cost: NDArray[np.float64], overhead: float) -> NDArray[np.float64]:
    """For each set the least cost of parts, with an overhead for each, that make it up."""
    best = np.full(len(cost), FORBIDDEN)
    best[0] = 0.0
    for whole in range(1, len(cost)):
        lowest = whole & -whole
        part = whole
        while part:
            if part & lowest:
                best[whole] = min(best[whole], cost[part] + overhead + best[whole ^ part])
            part = (part - 1) & whole
    return best


def _best_step(tiny: Tiny) -> float:
    groups = len(groups_of(tiny.lanes))
    masks = _masks(len(tiny.lengths), groups, groups)
    cost = {k: _costs(tiny, k) + _packs_cost(tiny, k) for k in _sizes(tiny)}
    return float(_lane_sums(tiny, masks, cost).max(axis=0).min())


def _packs_cost(tiny: Tiny, cp_size: int) -> NDArray[np.float64]:
    """Seconds of the fewest packs of a CP size that hold each set of sequences."""
    members = _subset_sums([1.0] * len(tiny.lengths))
    fits = (_tokens(tiny, cp_size) <= tiny.capacity) & (members <= tiny.max_sequences)
    return _best_parting(np.where(fits, tiny.profile.pack, FORBIDDEN), 0.0)
