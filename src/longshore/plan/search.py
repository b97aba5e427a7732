"""Finds good rounds: tries several ways to fill them and keeps the best.

In: a Problem. Out: a Draft, the packs of all rounds with each round's height.

Where lanes meet after each round, a step costs the sum of the rounds' heights, so a round should be
level; how full it is matters little. Two ways are combined. Level rounds share one height. Tall
rounds come before them: while the longest item is taller than the level, a round is opened for it
and filled up with the longest items that fit. Its height is a choice: low, and long items must be
split further and exchange more; high, and the shorter items beside them run out of tokens before
they are as tall. On 8 lanes one item of 131072 tokens among short ones so gets a tall round of its
own, and the short ones share low rounds.
"""

import math
from collections.abc import Iterator
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
