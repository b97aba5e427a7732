"""Finds rounds for a pipeline: their heights fall evenly from a tallest to a lowest.

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

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from longshore.plan.cost import Ints
from longshore.plan.packing import NEVER, Aim, Problem, fill
from longshore.plan.search import EMPTY, USUAL_WASTE, Draft, least_rounds, search_rounds

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
