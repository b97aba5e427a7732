"""Fills rounds with items, searches for good rounds, and bounds what any plan takes.

In: a Problem, the integer costs and tokens of every item at every legal CP size. Out: a Draft, the
packs of all rounds with each round's height; and a time in quanta that no plan can beat.

An item is what must stay together: a sequence, or a pack that the caller made. A block is an
aligned run of `k` lanes of one round. Levels are filled from the largest CP size down, as a buddy
allocator splits, so that a lane may carry its share of one very long item and short items of its
own. Two limits hold on every lane: tokens (capacity) and cost (the height aimed at). Three items of
cost 8, 3 and 3 (linear, no exchange) on 2 lanes at height 7: the first takes CP size 2 and leaves 3
on each lane, which the other two fill at CP size 1.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import CostTable, Ints
from longshore.plan.shapes import is_power_of_two
from longshore.plan.types import PlanSetting

NEVER = 1 << 60
"""Larger than any cost or area that fits."""


_Level = tuple[int, Ints, dict[int, list[int]]]


class BlockItems(NamedTuple):
    """Items joined on one block of a round."""

    round: int
    first_lane: int
    cp_size: int
    items: list[int]


@dataclass(frozen=True, slots=True)
class Filled:
    """The rounds that one filling made."""

    lanes: int
    """Lanes of a round."""
    levels: list[_Level]
    """(CP size, items, the indices into them by the number of their block) of each CP size."""
    heights: list[int]
    """What each round takes."""
    left: Ints
    """Items that fit nowhere."""

    def blocks(self, first_round: int) -> Iterator[BlockItems]:
        for cp_size, array, members in self.levels:
            items = array.tolist()
            for number in sorted(members):
                round_, block = divmod(number, self.lanes // cp_size)
                joined = [items[i] for i in members[number]]
                yield BlockItems(first_round + round_, block * cp_size, cp_size, joined)


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
    """Best fit below the height, and left if nothing fits; else where the load is least."""
    whole: bool = False
    """Stop as soon as an item is left."""


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
    return Filled(problem.lanes, board.levels, board.heights(), np.sort(np.concatenate(left)))


class _Board:
    """Cost, tokens and items of every lane in every round while levels are filled."""

    def __init__(self, problem: Problem, rounds: int) -> None:
        self.problem = problem
        self.rounds = rounds
        self.load, self.tokens, self.count = np.zeros((3, rounds, problem.lanes), dtype=np.int64)
        self.levels: list[_Level] = []

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
            # Where most items are mostly token-wise, they should be even in tokens, not in cost.
            by_tokens = False
            if self.problem.tokenwise and not self.problem.is_apart:
                apart = 2 * self.problem.tokenwise * tokens > cost
                by_tokens = 2 * int(apart.sum()) > len(cost)
            left = blocks.worst_fit(cost, tokens, by_tokens=by_tokens)
        self.levels.append((size, items, blocks.members))
        self._settle(blocks, size)
        return items[left]

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
        """Each item goes to the fullest block that takes it. Returns the items left.

        Items come by falling cost and tokens, so a block takes all from some item on; the index of
        that item is the block's key.
        """
        bits, mask, end = self.bits, (1 << self.bits) - 1, len(cost)
        load, used, count, members = self.load, self.tokens, self.count, self.members
        height, capacity, max_items, pack = aim.height, self.capacity, self.max_items, self.pack
        keys = self._first_items(cost, tokens, height - pack)
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

    def _first_items(self, cost: Ints, tokens: Ints, most: int) -> list[int]:
        """The keys of all open blocks before anything is placed; most: cost of a block."""
        by_cost = np.searchsorted(-cost, self.load_before[self.open] - most)
        by_tokens = np.searchsorted(-tokens, self.tokens_before[self.open] - self.capacity)
        start = np.maximum(by_cost, by_tokens)
        mask = (1 << self.bits) - 1
        keys: list[int] = np.sort((start << self.bits) | (mask - self.open)).tolist()
        return keys

    def worst_fit(self, cost: Ints, tokens: Ints, *, by_tokens: bool = False) -> list[int]:
        """Each item goes to the block with the least load, or tokens. Returns the items left.

        A block that is too full for an item waits until the items are small enough for it.
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
    """A time in quanta that no plan can beat. `linear` is the least quanta that a token costs.

    A plan that ends by T gives every item a CP size that fits its lanes and costs at most T, and
    the lanes have lanes·T quanta together for the areas (CP size × cost) of those choices. The
    smallest T for which the cheapest choices fit is therefore a bound. Two observations make it
    tighter. A lane that works pays for at least one pack, and together the lanes pay for one pack
    for every `capacity` tokens. And where lanes meet after each round, an item's round is not all
    of the step: the other rounds carry at least what one round cannot hold, lanes · capacity
    tokens, and take their time for it.

    With one item of cost 8 and one of cost 2 on 2 lanes (CP sizes 1 and 2, no exchange, no pack
    cost) T is 5: the first must be split to end before 8, and both together have an area of 10.
    """
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


def work_bound(problem: Problem, setting: PlanSetting) -> int:
    """Quanta that the rounds of every plan take together."""
    linear = int(setting.profile.linear * problem.table.scale)
    return lower_bound(problem, sync=setting.sync, linear=linear)


GOOD_ENOUGH = 1.004
"""A draft this close to the bound ends the search."""
USUAL_WASTE = 1.02
"""What level rounds take above the bare area of their items, for estimates."""
MOST_CHOICES = 800
"""Choices of CP sizes for all items together that are few enough to try each."""
TOLERANCES = (0.0, 0.012, 0.03, 0.08)
"""How much more area items may take to be placed more evenly: each is tried."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Fillings one after another, and the heights of all their rounds."""

    parts: tuple[Filled, ...]
    heights: list[int]

    def time(self, problem: Problem) -> int:
        """Quanta of all rounds."""
        return sum(self.heights) + problem.table.round * len(self.heights)

    def then(self, filled: Filled) -> "Draft":
        return Draft((*self.parts, filled), self.heights + filled.heights)

    def blocks(self) -> Iterator[BlockItems]:
        first_round = 0
        for part in self.parts:
            yield from part.blocks(first_round)
            first_round += len(part.heights)


EMPTY = Draft((), [])


class Search:
    """The best draft so far, and how much may still be tried. One try is one filling."""

    def __init__(self, problem: Problem, bound: int) -> None:
        self.problem = problem
        self.bound = bound
        self.best: Draft | None = None
        count = len(problem.cost)
        self.tries = 5 + min(40, 3000 // count) if problem.sole else 16 + min(100, 16000 // count)

    def offer(self, draft: Draft) -> bool:
        if self.best is None or draft.time(self.problem) < self.best.time(self.problem):
            self.best = draft
            return True
        return False

    def done(self) -> bool:
        if self.best is None:
            return False
        return self.tries <= 0 or self.best.time(self.problem) <= self.bound * GOOD_ENOUGH

    def hopeless(self, time: int) -> bool:
        return self.best is not None and time >= self.best.time(self.problem)


def search_rounds(problem: Problem, *, bound: int) -> Draft:
    """The best draft for lanes that meet after every round.

    A step costs the sum of the rounds' heights, so a round should be level; how full it is matters
    little. Two ways are combined. Level rounds share one height. Tall rounds come before them:
    while the longest item is taller than the level, a round is opened for it and filled up with the
    longest items that fit. Its height is a choice: low, and long items must be split further and
    exchange more; high, and the shorter items beside them run out of tokens before they are as
    tall. On 8 lanes one item of 131072 tokens among short ones so gets a tall round of its own, and
    the short ones share low rounds.
    """
    search = Search(problem, bound)
    everything = np.arange(len(problem.cost))
    ranked = []
    for count, (draft, left) in enumerate(peel(search, everything)):
        if search.done() or search.hopeless(draft.time(problem) + floor(problem, left)):
            break
        if not len(left):
            search.offer(draft)
        elif is_power_of_two(count) or not is_tall(problem, left):
            rounds = least_rounds(problem, left, fill=0.95)
            time = spread(search, draft, left, rounds=rounds, tolerance=0.0)
            ranked.append((time, count, draft, left))
    refine(search, EMPTY, everything)
    for _, count, draft, left in sorted(ranked, key=lambda entry: entry[:2])[:2]:
        if count and not search.done():
            refine(search, draft, left)
    try_all_levels(search, everything)
    assert search.best is not None
    return search.best


def search_step(problem: Problem, *, bound: int) -> Draft:
    """One level round of unbounded capacity, for lanes that meet only in shared packs."""
    search = Search(problem, bound)
    everything = np.arange(len(problem.cost))
    spread(search, EMPTY, everything, rounds=1, tolerance=0.0)
    refine_rounds(search, EMPTY, everything, rounds=1)
    try_all_levels(search, everything)
    assert search.best is not None
    return search.best


def try_all_levels(search: Search, items: Ints) -> None:
    """For a handful of items, every choice of CP sizes, in as few rounds as they fit into.

    Elsewhere items of one length get one CP size; among few short ones that can waste whole rounds.
    """
    problem = search.problem
    legal = (problem.cost < NEVER).sum(axis=1)
    if len(items) > 9 or math.prod(legal.tolist()) > MOST_CHOICES:
        return
    aim = Aim(NEVER, 0.0, tight=False)
    for choice in product(*(np.flatnonzero(row < NEVER).tolist() for row in problem.cost)):
        draft, left, levels = EMPTY, items, np.array(choice)
        while len(left) and not search.hopeless(draft.time(problem)):
            filled = fill(problem, left, rounds=1, aim=aim, levels=levels[left])
            draft, left = draft.then(filled), filled.left
        if not len(left):
            search.offer(draft)


def least_rounds(problem: Problem, items: Ints, *, fill: float = 1.0) -> int:
    capacity = max(1, int(problem.lanes * problem.capacity * fill))
    by_tokens = -(-int(problem.least_tokens[items].sum()) // capacity)
    by_count = -(-len(items) // (problem.lanes * problem.max_items))
    return max(1, by_tokens, by_count)


def floor(problem: Problem, items: Ints) -> int:
    """The least time that level rounds could take for these items."""
    return int(problem.least_area[items].sum()) // problem.lanes + problem.pack


def spread(search: Search, start: Draft, items: Ints, *, rounds: int, tolerance: float) -> int:
    """Level rounds, each item where the load is least; rounds are added for what does not fit."""
    problem = search.problem
    draft, left = start, items
    while len(left):
        height = floor(problem, left) // rounds + problem.pack
        aim = Aim(height, tolerance, tight=False)
        filled = fill(problem, left, rounds=rounds, aim=aim)
        draft, left = draft.then(filled), filled.left
        rounds = least_rounds(problem, left)
    search.tries -= 1
    search.offer(draft)
    return draft.time(problem)


def refine(search: Search, start: Draft, items: Ints) -> None:
    """Tries level rounds of other shapes for these items."""
    problem = search.problem
    least = least_rounds(problem, items)
    for rounds in dict.fromkeys((least, least_rounds(problem, items, fill=0.9), least + 1)):
        refine_rounds(search, start, items, rounds=rounds)


def refine_rounds(search: Search, start: Draft, items: Ints, *, rounds: int) -> None:
    """The same with a given number of rounds."""
    if not search.done():
        spread(search, start, items, rounds=rounds, tolerance=0.03)
    for tolerance in TOLERANCES:
        tighten(search, start, items, rounds=rounds, tolerance=tolerance)


def tighten(search: Search, start: Draft, items: Ints, *, rounds: int, tolerance: float) -> None:
    """Looks for a lower height at which all items fit; gives up if the first try fails."""
    problem = search.problem
    before = start.time(problem)
    low = floor(problem, items) // rounds
    if rounds == 1:
        low = max(low, search.bound - before - problem.table.round)
    assert search.best is not None
    high = int((search.best.time(problem) - before) / rounds) - problem.table.round
    height = int(high * 0.99)
    while not search.done() and low < height and high - low > low >> 8:
        aim = Aim(height, tolerance, tight=True, whole=True)
        filled = fill(problem, items, rounds=rounds, aim=aim)
        search.tries -= 1
        if not len(filled.left):
            search.offer(start.then(filled))
            high = height
        elif height > high * 0.985:
            return
        else:
            low = height
        height = (low + high) // 2


def peel(search: Search, items: Ints) -> Iterator[tuple[Draft, Ints]]:
    """Tall rounds, one after another: what is done after each, and the items left."""
    problem = search.problem
    draft, left = EMPTY, items
    yield draft, left
    while len(left) and is_tall(problem, left):
        candidates = 1 if problem.sole else 3
        time = search.bound - draft.time(problem)
        filled = tall_round(problem, left, time=time, candidates=candidates)
        search.tries -= candidates * len(left) // len(items)
        draft, left = draft.then(filled), filled.left
        yield draft, left


def is_tall(problem: Problem, items: Ints) -> bool:
    """Whether the longest item, at its CP size of least area, is taller than level rounds."""
    return int(problem.natural[items[0]]) > floor(problem, items) // least_rounds(problem, items)


def tall_round(problem: Problem, items: Ints, *, time: int, candidates: int) -> Filled:
    """One round with the longest item, of the height that wastes the least of the time left."""
    heights = tall_heights(problem, int(items[0]), most=time + time // 8)
    area = problem.least_area[items].cumsum()
    tokens = problem.least_tokens[items].cumsum()
    by_tokens = int(np.searchsorted(tokens, problem.lanes * problem.capacity))
    guesses = []
    for height in heights:
        enough = min(by_tokens, int(np.searchsorted(area, problem.lanes * height))) + 1
        guesses.append((guess_time(problem, items, enough, height, time), height))
    guesses.sort()
    best: tuple[int, Filled] | None = None
    for _, height in guesses[:candidates]:
        filled = fill(problem, items, rounds=1, aim=Aim(height, 0.0, tight=True))
        total = time_after(problem, filled.left, filled.heights[0], time)
        if best is None or total < best[0]:
            best = (total, filled)
    assert best is not None
    return best[1]


def tall_heights(problem: Problem, longest: int, *, most: int) -> list[int]:
    """Heights to try: the longest item's cost at each CP size, and steps between."""
    costs = [int(c) + problem.pack for c in problem.cost[longest] if c < NEVER]
    top = max(min(most, max(costs)), min(costs))
    heights = {int(c * step) for c in costs for step in (1.0, 1.1, 1.2, 1.35)}
    return sorted(height for height in heights if height <= top)


def guess_time(problem: Problem, items: Ints, enough: int, height: int, time: int) -> int:
    """Time for all items when one round of this height takes the first `enough`, by area alone."""
    head = items[:enough]
    levels = choose_levels(problem, head, Aim(height, 0.0, tight=True))
    alone = 2 * problem.cost[head, levels] > height - problem.pack
    width = (np.array(problem.sizes)[levels] * alone).cumsum()
    placed = ~alone | (width <= problem.lanes)
    placed &= (problem.area[head, levels] * placed).cumsum() <= problem.lanes * height
    placed &= (problem.least_tokens[head] * placed).cumsum() <= problem.lanes * problem.capacity
    rest = np.concatenate((head[~placed], items[len(head) :]))
    return time_after(problem, rest, height, time)


def time_after(problem: Problem, rest: Ints, height: int, time: int) -> int:
    """About the time of a round of this height and level rounds for the rest, `time` being left."""
    area = area_within(problem, rest, max(time - height, time >> 5))
    return int(height + USUAL_WASTE * area / problem.lanes)


def area_within(problem: Problem, items: Ints, height: int) -> int:
    """The least area of these items when none may be taller than this, as far as that can be."""
    total = int(problem.least_area[items].sum())
    tall = items[problem.natural[items] > height]
    if len(tall):
        limit = np.maximum(height, problem.cost[tall].min(axis=1))[:, None]
        area = np.where(problem.cost[tall] <= limit, problem.area[tall], NEVER).min(axis=1)
        total += int(area.sum()) - int(problem.least_area[tall].sum())
    return total
