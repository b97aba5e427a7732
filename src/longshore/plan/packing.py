"""Fills rounds with items, each with a CP size and a block of lanes; and a bound for any plan.

An item is what must stay together: a sequence, or a pack that the caller made. A block is an
aligned run of `k` lanes of one round. Levels are filled from the largest CP size down, as a buddy
allocator splits, so that a lane may carry its share of one very long item and short items of its
own. Two limits hold on every lane: tokens (capacity) and cost (the height aimed at).

Three items of cost 8, 3 and 3 (linear, no exchange) on 2 lanes at height 7: the first takes CP size
2 and leaves 3 on each lane, which the other two fill at CP size 1.

The bound is a time that no plan can beat. In: integer costs of every item at every legal CP size.
Out: quanta.

A plan that ends by T gives every item a CP size that fits its lanes and costs at most T, and the
lanes have lanes·T quanta together for the areas (CP size × cost) of those choices. The smallest T
for which the cheapest choices fit is therefore a bound. Two observations make it tighter. A lane
that works pays for at least one pack, and together the lanes pay for one pack for every `capacity`
tokens. And where lanes meet after each round, an item's round is not all of the step: the other
rounds carry at least what one round cannot hold, lanes · capacity tokens, and take their time for
it.

With one item of cost 8 and one of cost 2 on 2 lanes (CP sizes 1 and 2, no exchange, no pack cost) T
is 5: the first must be split to end before 8, and both together have an area of 10.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import CostTable, Ints

NEVER = 1 << 60
"""Larger than any cost or area that fits."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Items joined on one block of a round."""

    round: int
    first_lane: int
    cp_size: int
    items: list[int]


@dataclass(frozen=True, slots=True)
class Level:
    """The blocks of one CP size, `per_round` in each round.

    `members`: the places in `items` of each block that has some.
    """

    cp_size: int
    per_round: int
    items: Ints
    members: dict[int, list[int]]

    def packs(self, first_round: int) -> Iterator[Placed]:
        items = self.items.tolist()
        for number in sorted(self.members):
            round_, place = divmod(number, self.per_round)
            placed = [items[i] for i in self.members[number]]
            yield Placed(first_round + round_, place * self.cp_size, self.cp_size, placed)


@dataclass(frozen=True, slots=True)
class Filled:
    """What a filling gave: levels, the heights of rounds, and items without a place."""

    levels: list[Level]
    heights: list[int]
    left: Ints


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """What a filling must keep to."""

    lanes: int
    """Lanes of a round."""
    capacity: int
    """The most tokens of an item on a lane."""
    lane_tokens: int
    """The most tokens of a lane in a round; above the capacity where rounds are cut later."""
    max_items: int
    """The most items of a lane in a round."""
    min_rounds: int
    """The least number of rounds."""
    sole: bool
    """Whether a lane has at most one pack in a round."""


class Problem:
    """The items of a step, by falling cost, with all that filling needs to know of them."""

    def __init__(
        self,
        table: CostTable,
        limits: PackingLimits,
        *,
        tokenwise: int = 0,
        is_apart: bool = False,
        alone: bool = False,
    ) -> None:
        """tokenwise: quanta of a token that have a maximum of their own, see RoundColumns.

        is_apart: whether the table's costs are without them. alone: an item's cost, but not its
        area, has the padding of a lane that holds the item alone, for a bound: whatever else is on
        the lane costs no less for each token.
        """
        self.table = table
        self.tokenwise = tokenwise
        self.is_apart = is_apart
        self.limits = limits
        self.lanes = limits.lanes
        self.capacity = limits.lane_tokens
        self.max_items = limits.max_items
        self.min_rounds = limits.min_rounds
        self.sole = limits.sole
        self.sizes = table.sizes
        self.pack = table.pack
        fits = table.tokens <= limits.capacity
        width = np.array(self.sizes, dtype=np.int64)
        self.pads = bool(table.padding) and limits.lane_tokens <= limits.capacity
        cost = table.cost + table.least_padding() if alone else table.cost
        self.cost: Ints = np.where(fits, cost, NEVER)
        self.area: Ints = np.where(fits, table.cost * width, NEVER)
        self.least_area: Ints = self.area.min(axis=1)
        self.natural: Ints = np.take_along_axis(
            self.cost, self.area.argmin(axis=1)[:, None], axis=1
        )[:, 0]
        self.least_tokens: Ints = np.where(fits, table.tokens * width, NEVER).min(axis=1)


@dataclass(frozen=True, slots=True)
class Aim:
    """What a filling aims at."""

    height: int
    """What a round should cost: no item gets a CP size at which it alone costs more."""
    tolerance: float
    """How much more area an item may take to cost each lane less and be placed more evenly."""
    tight: bool
    """Best fit below the height, and no place if nothing fits; else where the load is least."""
    whole: bool = False
    """Stop as soon as an item has no place."""


def choose_levels(problem: Problem, items: Ints, aim: Aim) -> NDArray[np.intp]:
    """Which CP size each item gets: the smallest that meets the height, or one within tolerance."""
    cost, area = problem.cost[items], problem.area[items]
    meets = cost <= aim.height - problem.pack
    first: NDArray[np.intp] = np.where(meets.any(axis=1), meets.argmax(axis=1), cost.argmin(axis=1))
    if aim.tolerance == 0:
        return first
    most = np.take_along_axis(area, first[:, None], axis=1) * (1 + aim.tolerance)
    near = (area <= most) & (np.arange(cost.shape[1]) >= first[:, None])
    chosen: NDArray[np.intp] = np.where(near, cost, NEVER).argmin(axis=1)
    return chosen


def fill(
    problem: Problem,
    items: Ints,
    *,
    rounds: int,
    aim: Aim,
    levels: NDArray[np.intp] | None = None,
) -> Filled:
    """Places items, given by falling cost, into `rounds` rounds; what does not fit is left.

    `levels`: which CP size each item gets, where that is not left to the aim.
    """
    board = _Board(problem, rounds)
    chosen = choose_levels(problem, items, aim) if levels is None else levels
    left = []
    for level in np.unique(chosen)[::-1].tolist():
        left.append(board.fill_level(level, items[chosen == level], aim))
        if aim.whole and len(left[-1]):
            break
    return Filled(board.levels, board.heights(), np.sort(np.concatenate(left)))


class _Board:
    """Cost, tokens and items of every lane in every round while levels are filled."""

    def __init__(self, problem: Problem, rounds: int) -> None:
        self.problem = problem
        self.rounds = rounds
        self.load, self.tokens, self.count = np.zeros((3, rounds, problem.lanes), dtype=np.int64)
        self.levels: list[Level] = []

    def heights(self) -> list[int]:
        """What each round takes."""
        load, tokenwise = self.load, self.problem.tokenwise
        added: Ints = np.zeros_like(self.tokens)
        if self.problem.pads:
            added, linear, quadratic = self.problem.table.lane_padding(self.tokens)
            load = load + linear + quadratic
        tops: Ints = load.max(axis=1)
        if tokenwise:
            apart = (self.tokens + added) * tokenwise
            mixers = load - added * tokenwise if self.problem.is_apart else load - apart
            tops = mixers.max(axis=1) + apart.max(axis=1)
        heights: list[int] = tops.tolist()
        return heights

    def fill_level(self, level: int, items: Ints, aim: Aim) -> Ints:
        size = self.problem.sizes[level]
        blocks = _Blocks(self, size)
        cost = self.problem.cost[items, level]
        if (cost[1:] > cost[:-1]).any():
            order = np.argsort(-cost, kind="stable")
            items, cost = items[order], cost[order]
        tokens = self.problem.table.tokens[items, level]
        if aim.tight:
            left = blocks.best_fit(cost, tokens, aim)
        else:
            left = blocks.worst_fit(cost, tokens, by_tokens=self._mostly_tokenwise(cost, tokens))
        self.levels.append(Level(size, self.problem.lanes // size, items, blocks.members))
        self._settle(blocks, size)
        return items[left]

    def _mostly_tokenwise(self, cost: Ints, tokens: Ints) -> bool:
        """Whether items should be even in tokens rather than in cost."""
        if not self.problem.tokenwise or self.problem.is_apart:
            return False
        apart = 2 * self.problem.tokenwise * tokens > cost
        return 2 * int(apart.sum()) > len(cost)

    def _settle(self, blocks: "_Blocks", size: int) -> None:
        lanes = self.problem.lanes // size * size
        shape = (self.rounds, lanes)
        for board, before, after in (
            (self.load, blocks.load_before, blocks.load),
            (self.tokens, blocks.tokens_before, blocks.tokens),
            (self.count, blocks.count_before, blocks.count),
        ):
            added = np.array(after, dtype=np.int64) - before
            board[:, :lanes] += np.repeat(added, size).reshape(shape)


class _Blocks:
    """All blocks of one size in all rounds. A block's load is that of its fullest lane."""

    def __init__(self, board: _Board, size: int) -> None:
        problem = board.problem
        lanes = problem.lanes // size * size
        shape = (board.rounds * (problem.lanes // size), size)
        grids = [grid[:, :lanes] for grid in (board.load, board.tokens, board.count)]
        before = [grid.reshape(shape).max(axis=1) for grid in grids]
        self.load_before, self.tokens_before, self.count_before = before
        self.load, self.tokens, self.count = (grid.tolist() for grid in before)
        # Of few blocks where lanes are many: a list for each would take longer than the filling.
        self.members: dict[int, list[int]] = {}
        self.capacity = problem.capacity
        self.max_items = problem.max_items
        self.pack = problem.pack
        self.bits = len(self.load).bit_length()
        closed = self.count_before >= problem.max_items
        if problem.sole:
            closed |= self.load_before > 0
        self.open: Ints = np.flatnonzero(~closed)

    def best_fit(self, cost: Ints, tokens: Ints, aim: Aim) -> list[int]:
        """Each item goes to the block with the least room that takes it. Returns the items left.

        Items come by falling cost and tokens, so a block takes all from some place on; that place
        is its key.
        """
        bits, mask, end = self.bits, (1 << self.bits) - 1, len(cost)
        load, used, count, members = self.load, self.tokens, self.count, self.members
        height, capacity, max_items, pack = aim.height, self.capacity, self.max_items, self.pack
        keys = self._first_places(cost, tokens, height - pack)
        costs, needs = cost.tolist(), tokens.tolist()
        falling, thinning = (-cost).tolist(), (-tokens).tolist()
        left: list[int] = []
        item = 0
        while item < end and keys:
            first = keys[0] >> bits
            if first > item:
                left.extend(range(item, min(first, end)))
                if aim.whole:
                    return left
                item = first
                continue
            block = mask - (keys.pop(bisect_left(keys, (item + 1) << bits) - 1) & mask)
            load[block] += costs[item] if block in members else costs[item] + pack
            used[block] += needs[item]
            count[block] += 1
            members.setdefault(block, []).append(item)
            item += 1
            if count[block] < max_items:
                start = bisect_left(falling, load[block] - height, item)
                start = bisect_left(thinning, used[block] - capacity, start)
                if start < end:
                    insort(keys, (start << bits) | (mask - block))
        left.extend(range(item, end))
        return left

    def _first_places(self, cost: Ints, tokens: Ints, room: int) -> list[int]:
        """The keys of all open blocks before anything is placed."""
        by_cost = np.searchsorted(-cost, self.load_before[self.open] - room)
        by_tokens = np.searchsorted(-tokens, self.tokens_before[self.open] - self.capacity)
        start = np.maximum(by_cost, by_tokens)
        mask = (1 << self.bits) - 1
        keys: list[int] = np.sort((start << self.bits) | (mask - self.open)).tolist()
        return keys

    def worst_fit(self, cost: Ints, tokens: Ints, *, by_tokens: bool = False) -> list[int]:
        """Each item goes to the block with the least load, or tokens. Returns the items left.

        A block without room for an item waits until the items are small enough for it.
        """
        bits, mask = self.bits, (1 << self.bits) - 1
        load, used, count, members = self.load, self.tokens, self.count, self.members
        capacity, max_items, pack = self.capacity, self.max_items, self.pack
        thinning = (-tokens).tolist()
        key = used if by_tokens else load
        heap = [(key[b] << bits) | b for b in self.open.tolist()]
        heapify(heap)
        waiting: list[int] = []
        left: list[int] = []
        for item, (add, need) in enumerate(zip(cost.tolist(), tokens.tolist(), strict=True)):
            while waiting and waiting[0] >> bits <= item:
                block = heappop(waiting) & mask
                heappush(heap, (key[block] << bits) | block)
            while heap and used[heap[0] & mask] + need > capacity:
                block = heappop(heap) & mask
                start = bisect_left(thinning, used[block] - capacity, item)
                heappush(waiting, (start << bits) | block)
            if not heap:
                left.append(item)
                continue
            block = heap[0] & mask
            load[block] += add if block in members else add + pack
            used[block] += need
            count[block] += 1
            members.setdefault(block, []).append(item)
            if count[block] < max_items:
                heapreplace(heap, (key[block] << bits) | block)
            else:
                heappop(heap)
        return left


def lower_bound(problem: Problem, *, sync: str, linear: int) -> int:
    """The bound in quanta. `linear` is the least quanta that a token costs."""
    tokens = int(problem.least_tokens.sum())
    packs = max(problem.lanes, -(-tokens // problem.capacity))
    fixed = problem.table.round + problem.pack
    elsewhere = 0
    if sync == "round":
        beyond = max(0, tokens - problem.lanes * problem.capacity)
        elsewhere = beyond * linear // problem.lanes

    def possible(time: int) -> bool:
        legal = problem.cost <= time - fixed - elsewhere
        area = np.where(legal, problem.area, NEVER).min(axis=1)
        if int(area.max()) >= NEVER:
            return False
        return int(area.sum()) + problem.pack * packs <= problem.lanes * (
            time - problem.table.round
        )

    low = int(problem.cost.min(axis=1).max()) + fixed + elsewhere - 1
    low = max(low, int(problem.least_area.sum()) // problem.lanes + problem.table.round - 1)
    high = max(low + 1, 1)
    while not possible(high):
        low, high = high, 2 * high
    while high - low > max(1, high >> 24):
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low + 1
