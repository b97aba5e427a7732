"""Finds good rounds: tries several ways to fill them and keeps the best.

In: a Problem. Out: a Draft, the packs of all rounds with each round's height.

Where lanes meet after each round, a step costs the sum of the rounds' heights, so a round should be
level; how full it is matters little. Two ways are combined. Level rounds share one height. Tall
rounds come before them: while the longest item is taller than the level, a round is opened for it
and filled up with the longest items that fit. Its height is a choice: low, and long items must be
split further and exchange more; high, and the shorter items beside them run out of tokens before
they are as tall. On 8 lanes one item of 131072 tokens among short ones so gets a tall round of its
own, and the short ones share low rounds.

Finds rounds for a pipeline: their heights fall evenly from a tallest to a lowest.

In: a Problem and a function that says how long rounds of given heights take. Out: a Draft.

In a pipeline the tallest round costs most, because other ranks wait while it runs through the
stages. The first and the last round cost too, while the pipeline fills and drains. So rounds run
from low to tall and back to low, and neighbours should be nearly as tall as each other: on 4 ranks
32 equal rounds take 9 % more than their work, 32 whose heights fall evenly from a tallest to almost
nothing 7 %, though their tallest is twice as tall, and 30 equal ones with 2 such tall ones 19 %.

Two heights are chosen from a grid. `top` is the most that a round costs: low, and long items must
be split further and exchange more. From there heights fall evenly to `low`, but stay higher while
items are left that could be split so far only with waste. The best pairs by area alone are walked,
and the best of these are filled for real, the longest items first. Equal rounds, one or two for
each rank, are tried besides; and where all items fit into fewer rounds than there are ranks, what a
step without a pipeline would run: on 1024 lanes one round of 14,107, four ranks long, beats any
cut of it into several whose tallest is hardly lower.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from longshore.plan.cost import Ints
from longshore.plan.packing import NEVER, Aim, Filled, Placed, Problem, choose_levels, fill
from longshore.plan.shapes import is_power_of_two

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

    def packs(self) -> Iterator[Placed]:
        first_round = 0
        for part in self.parts:
            for level in part.levels:
                yield from level.packs(first_round)
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
    """The best draft for lanes that meet after every round."""
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
    room = max(1, int(problem.lanes * problem.capacity * fill))
    by_tokens = -(-int(problem.least_tokens[items].sum()) // room)
    by_count = -(-len(items) // (problem.lanes * problem.max_items))
    return max(problem.min_rounds, by_tokens, by_count)


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


Time = Callable[[list[int]], int]
"""The finish of rounds of these heights."""

HEIGHTS = 24
"""Heights of the grid."""
FALLS = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.03)
"""The lowest round as a share of the tallest."""
GUESSES = 20
"""Pairs of heights that are walked."""
GUESSED_ROUNDS = 12_000
"""About the most rounds of all guesses; where rounds are many, heights matter less."""
FILLINGS = 5
"""Pairs of heights that are filled."""
WORTH_A_SPLIT = 1.05
"""An item is split further to fit into a lower round if its area grows by no more than this."""
LEVEL_SLACKS = (1.0025, 1.005, 1.01, 1.015, 1.02, 1.03, 1.045, 1.06, 1.08, 1.1)
"""How much higher than their area asks for equal rounds are made until all items fit."""
FULL = 0.97
"""The share of a round's tokens that are used before it counts as full, for guesses."""


@dataclass(frozen=True, slots=True)
class Fall:
    """Heights that fall evenly."""

    top: int
    """The place of the tallest in the grid."""
    low: int
    """The lowest."""
    equal: int
    """Rounds that are as tall as the tallest before they fall."""
    rounds: int
    """How many there are from the last of these to the lowest."""

    def target(self, tallest: int, number: int) -> int:
        """Of one round; beyond the last they stay at the lowest."""
        after = max(0, number - self.equal)
        if self.rounds == 1 or not after:
            return tallest
        return max(self.low, tallest - (tallest - self.low) * after // (self.rounds - 1))


class HeightGrid:
    """Areas of all items where none may cost more than each height of the grid."""

    def __init__(self, problem: Problem, bound: int) -> None:
        self.problem = problem
        fixed = problem.pack + problem.table.round
        self.least = int(problem.cost.min(axis=1).max()) + fixed
        work = int(problem.least_area.sum()) // problem.lanes + fixed
        natural = int(problem.natural.max()) + fixed
        top = max(self.least, min(work, natural))
        if top == self.least:
            # Few items a lane: a little taller, and the longest need not be split over all lanes.
            top = max(top, min(bound + fixed, natural))
        bottom = max(1, min(self.least, work // 256 + fixed))
        grid = np.geomspace(bottom, max(top, bottom + 1), HEIGHTS).astype(np.int64).tolist()
        self.heights = sorted({*grid, self.least, top})
        self.areas = [self._areas(height - problem.pack) for height in self.heights]

    def _areas(self, cost: int) -> Ints:
        """Of each item; NEVER where it cannot be split far enough."""
        problem = self.problem
        areas = problem.least_area.copy()
        tall = problem.natural > cost
        legal = problem.cost[tall] <= cost
        areas[tall] = np.where(legal, problem.area[tall], NEVER).min(axis=1)
        return areas

    def tops(self) -> list[int]:
        """Places of the heights that the tallest round may have."""
        return [place for place, height in enumerate(self.heights) if height >= self.least]

    def tall_until(self, top: int) -> list[int]:
        """For each height up to `top`, the place after the last item that is too long for it."""
        limit = self.areas[top] * WORTH_A_SPLIT
        places = []
        for areas in self.areas[: top + 1]:
            tall = np.flatnonzero(areas > limit)
            places.append(int(tall[-1]) + 1 if len(tall) else 0)
        return places

    def needed(self, tall_until: list[int], longest: int) -> int:
        """The least height for which an item, and all that are shorter, are not too long."""
        # Places fall while heights rise.
        place = bisect_left(tall_until, -longest, key=lambda until: -until)
        height: int = self.heights[min(place, len(tall_until) - 1)]
        return height

    def level_height(self, rounds: int) -> int:
        """The least height, by area, of so many equal rounds."""
        problem, before = self.problem, self.least
        for top in self.tops():
            work = int(self.areas[top].sum()) // (problem.lanes * rounds) + problem.pack
            if work <= self.heights[top]:
                return max(work, before)
            before = self.heights[top]
        return max(work, before)


class Guesser:
    """Guesses the rounds that a tallest height leads to, by areas and tokens alone."""

    def __init__(self, grid: HeightGrid, top: int) -> None:
        self.grid, self.top = grid, top
        problem = grid.problem
        self.tall_until = grid.tall_until(top)
        # As lists: their items are read one by one.
        self.area: list[float] = np.cumsum(grid.areas[top] * USUAL_WASTE).tolist()
        self.tokens: list[int] = np.cumsum(problem.least_tokens).tolist()
        self.room = problem.lanes * problem.capacity * FULL

    def falls(self, pp: int) -> Iterator[Fall]:
        """Different ways down from the tallest height."""
        problem, tallest = self.grid.problem, self.grid.heights[self.top]
        work = self.area[-1] / problem.lanes
        by_tokens = self.tokens[-1] / self.room
        for equal in (0, pp // 2, pp - 1):
            if equal and equal * tallest > work / 2:
                return
            for share in FALLS:
                low = max(int(tallest * share), min(tallest, 2 * problem.pack))
                each = max(1.0, (tallest + low) / 2 - problem.pack)
                rounds = max((work - equal * tallest) / each, by_tokens - equal)
                yield Fall(self.top, low, equal, max(1, round(rounds)))

    def heights(self, fall: Fall) -> list[int]:
        problem, tallest = self.grid.problem, self.grid.heights[self.top]
        total, area, item = self.area[-1], 0.0, 0
        heights: list[int] = []
        while area < total * 0.999:
            target = fall.target(tallest, len(heights))
            target = min(tallest, max(target, self.grid.needed(self.tall_until, item)))
            after = min(total, area + problem.lanes * max(1, target - problem.pack))
            last = bisect_left(self.area, after)
            before = self.tokens[item - 1] if item else 0
            if last < len(self.tokens) and self.tokens[last] - before > self.room:
                last = max(item + 1, bisect_left(self.tokens, before + self.room))
                after = max(area + 1.0, min(after, self.area[last - 1]))
            heights.append(int((after - area) / problem.lanes) + problem.pack)
            area, item = after, min(last, len(self.area) - 1)
        return heights


def rough_time(heights: list[int], *, pp: int, vpp: int) -> float:
    """Work, and what the pipeline adds: less where heights fall evenly, see the top."""
    falling = sorted(heights, reverse=True)
    jump = max((a - b for a, b in zip(falling, falling[2:], strict=False)), default=0)
    added = 0.4 * falling[0] + 0.6 * min(falling[0], falling[-1] + jump)
    return sum(heights) + added * (pp - 1) / vpp


def search_pipeline(problem: Problem, time: Time, *, bound: int, pp: int, vpp: int) -> Draft:
    """The fastest draft of the best guesses. bound: quanta that no rounds together go below."""
    grid = HeightGrid(problem, bound)
    guesses: list[tuple[float, int, Fall, list[int]]] = []
    tops = grid.tops()
    rounds = sum(fall.rounds for fall in Guesser(grid, tops[-1]).falls(pp))
    step = 1 + len(tops) * rounds // GUESSED_ROUNDS
    for top in tops[::step]:
        guesser = Guesser(grid, top)
        for fall in dict.fromkeys(guesser.falls(pp)):
            heights = guesser.heights(fall)
            rough = rough_time(heights, pp=pp, vpp=vpp)
            guesses.append((rough, len(guesses), fall, heights))
    guesses.sort(key=lambda entry: entry[:2])
    walked = [(time(heights), place, fall) for _, place, fall, heights in guesses[:GUESSES]]
    walked.sort(key=lambda entry: entry[:2])
    drafts = [fill_fall(grid, fall) for _, _, fall in walked[:FILLINGS]]
    best = min(drafts, key=lambda draft: time(draft.heights))
    for rounds in (pp, 2 * pp):
        best = fill_level_rounds(grid, rounds, time, best)
    return fewest_rounds(problem, time, best, bound=bound, pp=pp)


def fewest_rounds(problem: Problem, time: Time, best: Draft, *, bound: int, pp: int) -> Draft:
    """The rounds of a step without a pipeline, if they are few and faster."""
    rounds = least_rounds(problem, np.arange(len(problem.cost)))
    fastest = time(best.heights)
    if rounds >= pp or time([bound // rounds] * rounds) >= fastest:
        return best
    draft = search_rounds(problem, bound=bound)
    return draft if time(draft.heights) < fastest else best


def fill_level_rounds(grid: HeightGrid, rounds: int, time: Time, best: Draft) -> Draft:
    """So many rounds of one height, as low as all items fit into, if that is faster."""
    problem = grid.problem
    if rounds < least_rounds(problem, np.arange(len(problem.cost))):
        return best
    everything, fastest = np.arange(len(problem.cost)), time(best.heights)
    lowest = grid.level_height(rounds)
    for slack in LEVEL_SLACKS:
        height = int(lowest * slack)
        if time([height] * rounds) >= fastest:
            break
        aim = Aim(height, 0.0, tight=True, whole=True)
        filled = fill(problem, everything, rounds=rounds, aim=aim)
        if not len(filled.left):
            draft = EMPTY.then(filled)
            return draft if time(draft.heights) < fastest else best
    return best


def fill_fall(grid: HeightGrid, fall: Fall) -> Draft:
    """Rounds of these heights one after another, each with the longest items that fit."""
    problem, tallest = grid.problem, grid.heights[fall.top]
    tall_until = grid.tall_until(fall.top)
    draft, left = EMPTY, np.arange(len(problem.cost))
    while len(left):
        target = fall.target(tallest, len(draft.heights))
        target = max(target, grid.needed(tall_until, int(left[0])))
        filled = fill(problem, left, rounds=1, aim=Aim(target, 0.0, tight=True))
        draft, left = draft.then(filled), filled.left
    return draft
