"""Plans for a pipeline: rounds of good heights, arranged to run fast, and bounds for both.

In: a Problem, or rounds with their costs, the pipeline size and the stages per rank. Out: a Draft
whose heights fall evenly; the same work as rounds that interleaving accepts (a multiple of pp when
vpp > 1), in an order that the simulator finds short; a time in 1/whole quanta that none can beat.

Rounds of heights 9, 3 and 3 on two ranks of one stage take 24 quanta, 15 of work and 9 of bubble;
as 3, 9, 3 they take 21. With two stages per rank a fourth round is needed: with an empty one at the
end 9, 3, 3 takes 22, and with the first cut in two, as 5, 4, 3, 3, it takes 17.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from longshore.plan.cost import Ints, StageCosts
from longshore.plan.packing import (
    EMPTY,
    NEVER,
    USUAL_WASTE,
    Aim,
    Draft,
    Problem,
    fill,
    least_rounds,
    search_rounds,
)
from longshore.plan.simulate import RoundColumns, finish_times, make_pack, wait_graph
from longshore.plan.types import Round

Item = tuple[Round, Ints]


# Effort, counted in actions walked and never in time, so that every rank decides alike.
ORDER_ACTIONS = 1_000_000
BATCH_ACTIONS = 300_000
SPLIT_ACTIONS = 8_000
SPLIT_GENERATIONS = 8
# Up to this many rounds, every number of rounds to cut is tried.
FEW_ROUNDS = 6
# A bubble of less than one part in 50 of the work is not worth more rounds.
SMALL_BUBBLE = 50
# One part in 200 is not worth a search: a finish so near the bound, a gain so small.
CLOSE = 200


@dataclass(frozen=True, slots=True)
class Pipe:
    """The pipeline, and how many bits times lose so that they stay inside 64."""

    pp: int
    vpp: int
    shift: int

    def legal(self, rounds: int) -> int:
        """The smallest number of rounds, at least this many, that the pipeline runs."""
        return rounds if self.vpp == 1 else -(-rounds // self.pp) * self.pp

    def actions(self, rounds: int) -> int:
        return 2 * rounds * self.pp * self.vpp

    def finishes(self, columns: Ints, orders: Ints) -> Ints:
        return finish_times(wait_graph(len(columns), pp=self.pp, vpp=self.vpp), columns, orders)

    def work(self, columns: Ints) -> int:
        """The work of the rank that has most of it."""
        stages = self.pp * self.vpp
        each = columns[:, : 2 * stages].sum(axis=0)
        return max(int(each[rank :: self.pp].sum()) for rank in range(self.pp))


@dataclass(frozen=True, slots=True, eq=False)
class Lineup:
    """Rounds in the order they run, their columns (shifted) and the finish of their walk."""

    rounds: tuple[Round, ...]
    columns: Ints
    finish: int


def arrange(
    rounds: Seq[Round], maker: RoundColumns, *, pp: int, vpp: int, may_split: bool
) -> tuple[Round, ...]:
    """The rounds as the pipeline should run them, their number legal for it.

    Everything is tried on the simulator, and the result is never slower than the rounds with work
    as they came, followed by the empty ones they need.

    `may_split` allows to divide the packs of a round over two rounds; without it rounds are only
    reordered, and empty ones added or left out. Without a pipeline they stay as they are. Equal
    input gives equal output everywhere.
    """
    if pp == 1 or not rounds:
        return tuple(rounds)
    lineups, pipe = _lineups(rounds, maker, pp=pp, vpp=vpp)
    given, whole = lineups[0], min(lineups, key=_finish)
    lineup = _improve(whole, pipe)
    if may_split:
        cut = _split_while_faster(whole, pipe, maker)
        lineup = lineup if cut is whole else min(lineup, _improve(cut, pipe), key=_finish)
    # The shift has taken less than two units from each action, so a larger gain is a true one.
    lost = 2 * pipe.actions(len(lineup.rounds)) if pipe.shift else 0
    return lineup.rounds if lineup.finish + lost < given.finish else given.rounds


def line_up_quickly(
    rounds: Seq[Round], maker: RoundColumns, *, pp: int, vpp: int
) -> tuple[Round, ...]:
    """The best of a few orders, with the empty rounds that the pipeline needs."""
    lineups, _ = _lineups(rounds, maker, pp=pp, vpp=vpp)
    return min(lineups, key=_finish).rounds


def quick_finish(heights: Seq[int], shares: StageCosts, *, pp: int, vpp: int) -> int:
    """About the finish of rounds of these heights in the better of two orders.

    Linear and quadratic parts are taken as half and half, and messages as free.
    """
    pipe = Pipe(pp, vpp, 0)
    filled = [*heights, *[0] * (pipe.legal(len(heights)) - len(heights))]
    halves = zip(
        (*shares.forward_linear, *shares.backward_linear),
        (*shares.forward_quadratic, *shares.backward_quadratic),
        strict=True,
    )
    weights = [*((linear + quadratic) // 2 for linear, quadratic in halves), *[0] * pp * vpp]
    shift = max(0, (sum(filled) * sum(weights)).bit_length() - 62)
    columns = (np.array(filled, dtype=np.int64) >> shift)[:, None] * np.array(weights)
    _, _, _, hill, _, early_hill = shapes(filled)
    return int(pipe.finishes(columns, np.array([hill, early_hill])).min()) << shift


def _lineups(
    rounds: Seq[Round], maker: RoundColumns, *, pp: int, vpp: int
) -> tuple[list[Lineup], Pipe]:
    """A few orders of the rounds with work, as given first."""
    work = [round_ for round_ in rounds if round_.packs] or list(rounds[:1])
    exact = maker.of(work)
    # Columns must fit into 64 bits with all their sums, also with four times the work.
    total = sum(map(sum, exact)) + (pp - 1) * sum(maker.of([Round(())])[0])
    pipe = Pipe(pp, vpp, max(0, (4 * total).bit_length() - 62))
    items = [(r, shifted(column, pipe.shift)) for r, column in zip(work, exact, strict=True)]
    return line_up(items, pipe, maker), pipe


def shifted(column: Seq[int], shift: int) -> Ints:
    return np.array([time >> shift for time in column], dtype=np.int64)


def _finish(lineup: Lineup) -> int:
    return lineup.finish


def line_up(items: Seq[Item], pipe: Pipe, maker: RoundColumns) -> list[Lineup]:
    """A few orders, as given first, after adding the empty rounds that make the number legal."""
    filled = [*items]
    if lacking := pipe.legal(len(items)) - len(items):
        filled += [(Round(()), shifted(maker.of([Round(())])[0], pipe.shift))] * lacking
    columns = np.stack([column for _, column in filled])
    orders = np.array(shapes(_lengths(columns)))
    finishes = pipe.finishes(columns, orders).tolist()
    return [
        Lineup(tuple(filled[i][0] for i in order), columns[order], finish)
        for order, finish in zip(orders.tolist(), finishes, strict=True)
    ]


def _lengths(columns: Ints) -> list[int]:
    """How long each round takes on all stages together."""
    lengths: list[int] = columns[:, : columns.shape[1] // 3 * 2].sum(axis=1).tolist()
    return lengths


def shapes(heights: list[int]) -> list[list[int]]:
    """Orders worth a try: as given, falling, rising, small ends (two ways), big ends."""
    given = list(range(len(heights)))
    falling = sorted(given, key=lambda i: -heights[i])
    rising = falling[::-1]
    # The last round's backward runs alone through all ranks, twice as long as the first's forward,
    # so the smallest goes last.
    hill = [*rising[1::2], *rising[0::2][::-1]]
    valley = [*falling[1::2], *falling[0::2][::-1]]
    early_hill = [*rising[1:2], *falling[: max(0, len(given) - 2)], *rising[:1]]
    return [given, falling, rising, hill, valley, early_hill]


def _improve(lineup: Lineup, pipe: Pipe) -> Lineup:
    """A better order of the same rounds: the best of all if they are few, else one near by."""
    columns, rounds = lineup.columns, len(lineup.rounds)
    bound, most = order_bound(columns, pp=pipe.pp), ORDER_ACTIONS // pipe.actions(rounds)
    if (lineup.finish - bound) * CLOSE <= bound or most < rounds:
        return lineup
    if math.factorial(rounds) <= most:
        orders = np.array(list(permutations(range(rounds))))
        finishes = pipe.finishes(columns, orders)
        best = int(np.argmin(finishes))
        order, finish = orders[best], int(finishes[best])
    else:
        order, finish = _local_search(columns, pipe, most)
    if finish >= lineup.finish:
        return lineup
    return Lineup(tuple(lineup.rounds[i] for i in order.tolist()), columns[order], finish)


def _local_search(columns: Ints, pipe: Pipe, most: int) -> tuple[Ints, int]:
    """The best that swaps and moves reach from a few orders, in at most about `most` walks."""
    starts = np.array(shapes(_lengths(columns)))
    finishes = pipe.finishes(columns, starts)
    neighbours = _neighbours(len(columns), most)
    best, lowest = starts[0], int(finishes[0])
    for start in np.argsort(finishes, kind="stable").tolist():
        order, finish = starts[start], int(finishes[start])
        order, finish, most = _descend(columns, order, finish, neighbours, pipe, most)
        if finish < lowest:
            best, lowest = order, finish
    return best, lowest


def _descend(
    columns: Ints, order: Ints, finish: int, neighbours: Ints, pipe: Pipe, most: int
) -> tuple[Ints, int, int]:
    """Goes to better neighbours while there are any; also returns the walks left of `most`."""
    batch = max(1, BATCH_ACTIONS // pipe.actions(len(columns)))
    first = 0
    while most > 0 and first < len(neighbours):
        tried = order[neighbours[first : first + batch]]
        finishes = pipe.finishes(columns, tried)
        most -= len(tried)
        first += batch
        best = int(np.argmin(finishes))
        if finishes[best] < finish:
            order, finish, first = tried[best], int(finishes[best]), 0
    return order, finish, most


def _neighbours(rounds: int, most: int) -> Ints:
    """Swaps of two rounds and moves of one to another position, evenly thinned to `most` rows."""
    first, second = np.divmod(np.arange(rounds * rounds), rounds)
    swaps, moves = second > first, abs(first - second) > 1
    kinds = np.repeat([0, 1], [swaps.sum(), moves.sum()])
    pairs = np.concatenate([np.argwhere(swaps), np.argwhere(moves)])[:, 0]
    kept = np.arange(0, len(pairs), max(1, -(-len(pairs) // max(1, most))))
    i, j = first[pairs[kept], None], second[pairs[kept], None]
    position = np.arange(rounds)[None, :]
    swapped = np.where(position == i, j, np.where(position == j, i, position))
    shifted = position + ((position >= i) & (position < j)) - ((position <= i) & (position > j))
    moved = np.where(position == j, i, shifted)
    rows: Ints = np.where(kinds[kept, None] == 0, swapped, moved)
    return rows


def _split_while_faster(lineup: Lineup, pipe: Pipe, maker: RoundColumns) -> Lineup:
    """Cuts the longest rounds in two, some or all of them, as long as the finish falls."""
    halves: dict[int, tuple[Round, list[Item]]] = {}
    for _ in range(SPLIT_GENERATIONS):
        work = pipe.work(lineup.columns)
        if (lineup.finish - work) * SMALL_BUBBLE < work:
            break
        tried = [lineup]
        for items in _proposals(lineup, pipe, maker, halves):
            columns = np.stack([column for _, column in items])
            few = pipe.actions(len(items)) <= SPLIT_ACTIONS
            if few and order_bound(columns, pp=pipe.pp) < lineup.finish:
                tried += line_up(items, pipe, maker)
        best = min(tried, key=_finish)
        gain, lineup = lineup.finish - best.finish, best
        if gain * CLOSE <= lineup.finish:
            break
    return lineup


def _proposals(
    lineup: Lineup, pipe: Pipe, maker: RoundColumns, halves: dict[int, tuple[Round, list[Item]]]
) -> Iterator[list[Item]]:
    """The rounds with work, with different numbers of the longest cut in two.

    halves: by the id of a round, it and its halves; beside them, so no other can take over the id.
    """
    items = [item for item in zip(lineup.rounds, lineup.columns, strict=True) if item[0].packs]
    if not items:
        return
    lengths = _lengths(np.stack([column for _, column in items]))
    by_length = sorted(range(len(items)), key=lambda i: -lengths[i])
    splittable = [i for i in by_length if sum(len(p.sequences) for p in items[i][0].packs) > 1]
    for count in _counts(len(items), len(splittable), pipe):
        cut = set(splittable[:count])
        for round_ in (items[i][0] for i in cut):
            if id(round_) not in halves:
                halves[id(round_)] = round_, _halves(round_, maker, pipe.shift)
        yield [
            piece
            for i, item in enumerate(items)
            for piece in (halves[id(item[0])][1] if i in cut else (item,))
            if piece[0].packs
        ]


def _halves(round_: Round, maker: RoundColumns, shift: int) -> list[Item]:
    """Two rounds with their shifted columns; the second is empty if nothing divides.

    The packs are divided alike on every lane, expensive sequences first: a lane whose pack has
    sequences of costs 5, 3 and 3 keeps the 5 in the first round and has both 3 in the second.
    """
    table = maker.table
    by_cost = sorted(
        (-table.costs_at(pack.cp_size)[sequence], number, sequence)
        for number, pack in enumerate(round_.packs)
        for sequence in pack.sequences
    )
    sides: list[list[set[int]]] = [[set() for _ in round_.packs] for _ in range(2)]
    loads = [[0] * maker.lanes for _ in range(2)]
    for negative, number, sequence in by_cost:
        pack = round_.packs[number]
        first, stop = pack.first_lane, pack.first_lane + pack.cp_size
        new = [-negative if side[number] else table.pack - negative for side in sides]
        right = max(loads[1][first:stop]) + new[1] < max(loads[0][first:stop]) + new[0]
        sides[right][number].add(sequence)
        for lane in range(first, stop):
            loads[right][lane] += new[right]
    rounds = []
    for side in sides:
        packs = [
            make_pack(
                table, pack.first_lane, pack.cp_size, tuple(i for i in pack.sequences if i in kept)
            )
            for pack, kept in zip(round_.packs, side, strict=True)
            if kept
        ]
        rounds.append(Round(tuple(packs)))
    columns = maker.of(rounds)
    return [(r, shifted(column, shift)) for r, column in zip(rounds, columns, strict=True)]


def _counts(rounds: int, splittable: int, pipe: Pipe) -> list[int]:
    """How many rounds to cut: few are tried one by one, of many all and half."""
    few = splittable <= FEW_ROUNDS
    some = set(range(1, splittable + 1)) if few else {splittable, splittable // 2}
    if pipe.vpp > 1:
        # Beside them the next numbers that need no empty rounds.
        some |= {count - (rounds + count) % pipe.pp for count in some}
        some |= {count + -(rounds + count) % pipe.pp for count in some}
    return sorted(count for count in some if 0 < count <= splittable)


STEPS = 48
"""Heights that are told apart."""


def order_bound(columns: Ints, *, pp: int) -> int:
    """A finish that no order of these rounds can beat, by three arguments.

    1. A rank starts after the first round's forwards on the stages before it, ends before the last
       round's backwards there, and works for all rounds in between: fill, work and drain.
    2. A tall round runs through all stages and back. Before it the first stage has run every
       earlier round's forward, after it every later round's backward.
    3. With one stage a rank, the last rank has done all rounds up to the tall one when it ends that
       round's backward. Then the backward runs through the other stages, and the first rank still
       has the later rounds to do, less the forwards of pp − 1 of them.

    Rounds of heights 9, 3 and 3 on two ranks, of which a third is forward, have 15 of work and take
    at least 15 + 3 = 18 by 1, 2·9 + 2·1 = 20 by 2, and 15 + 6 − 1 = 20 by 3.
    """
    stages = columns.shape[1] // 3
    forward, backward = columns[:, :stages], columns[:, stages : 2 * stages]
    both = forward + backward
    bounds = [
        int(both[:, rank::pp].sum())
        + _two_ends(forward[:, :rank].sum(axis=1), backward[:, :rank].sum(axis=1))
        for rank in range(pp)
    ]
    least = np.minimum(forward[:, 0], backward[:, 0])
    bounds.append(int((both.sum(axis=1) + int(least.sum()) - least).max()))
    if pp == stages:
        work = int(np.minimum(both[:, 0], both[:, -1]).sum())
        later = int(np.sort(forward[:, 0])[::-1][: pp - 1].sum())
        bounds.append(work + int(backward[:, :-1].sum(axis=1).max()) - later)
    return max(bounds)


def _two_ends(fill: Ints, drain: Ints) -> int:
    """The least sum of one round's fill and another's drain."""
    if len(fill) == 1:
        return int(fill[0] + drain[0])
    first, second = np.argsort(drain, kind="stable")[:2]
    others = np.full(len(fill), drain[first])
    others[first] = drain[second]
    return int((fill + others).min())


def capped_works(problem: Problem) -> list[tuple[int, int]]:
    """(height, the least work of an average rank where no round is taller), in quanta.

    Heights rise from the least that is possible to one that no longer matters.
    """
    fixed = problem.pack + problem.table.round
    low = int(problem.cost.min(axis=1).max()) + fixed
    high = max(low, int(problem.natural.max()) + fixed)
    grid = np.unique(np.geomspace(max(1, low), max(1, high), STEPS).astype(np.int64))
    grid[0], grid[-1] = low, high
    tokens = int(problem.least_tokens.sum())
    packs = max(problem.lanes, -(-tokens // problem.capacity))
    works = []
    for height in grid.tolist():
        area = _least_area(problem, height - fixed)
        work = (area + problem.pack * packs) // problem.lanes + problem.table.round
        works.append((height, work))
    return works


def _least_area(problem: Problem, cost: int) -> int:
    """The least area of all items, where each costs at most this."""
    tall = problem.natural > cost
    total = int(problem.least_area[~tall].sum())
    if tall.any():
        legal = problem.cost[tall] <= cost
        total += int(np.where(legal, problem.area[tall], NEVER).min(axis=1).sum())
    return total


def densest_area(problem: Problem, *, rounds: int) -> int:
    """An area that the items of this many rounds do not exceed, each at its least."""
    density = problem.least_area / problem.least_tokens
    order = np.argsort(-density, kind="stable")
    tokens = problem.least_tokens[order].cumsum()
    # The item that exceeds the tokens counts too.
    count = int(np.searchsorted(tokens, rounds * problem.lanes * problem.capacity)) + 1
    return int(problem.least_area[order[:count]].sum())


def plan_bound(problem: Problem, shares: StageCosts, *, pp: int, least_work: int) -> int:
    """A time that no plan can beat, in 1/whole quanta, with messages as free.

    least_work: quanta that no plan's average rank goes below. Let H be the height of a plan's
    tallest round. No item costs more, which tells the least area of its items, and so the least
    work W of a rank. By 2 of `order_bound` the step takes at least pp·H and a third of W − H, and
    by 3, as no other forward is longer than the tallest round's, W + (pp − 1)·H/3. It is more where
    rounds as tall cannot follow: pp rounds hold limited tokens, so of all items' area only what is
    densest, and anything they cost besides makes W larger. The best H is not known, so the bound is
    the least for any: low, and long items must be split far; high, and the tallest round alone
    takes long.
    """
    ranks = [min(shares.of_rank(rank, pp)) for rank in range(pp)]
    # An average rank has `whole` of the work, so the busiest has at least as much.
    busiest = max(shares.whole, *ranks)
    forward = max(shares.forward_linear[0], shares.forward_quadratic[0])
    backwards = list(map(min, shares.backward_linear, shares.backward_quadratic))
    first = min(shares.forward_linear[0], shares.forward_quadratic[0], backwards[0])
    drain, outer = sum(backwards[:-1]), min(ranks[0], ranks[-1])
    follows = shares.stages == pp and drain >= (pp - 1) * forward and outer >= forward
    dense = densest_area(problem, rounds=pp) // problem.lanes + 1
    least = int(problem.least_area.sum()) // problem.lanes
    works = capped_works(problem)
    times = []
    # Between two heights of the grid: as tall as the lower, and the work at the higher.
    for (height, _), (_, capped) in (*pairwise(works), (works[-1], works[-1])):
        work = max(least_work, capped)
        time = max(busiest * work, pp * shares.whole * height + first * max(0, work - height))
        if follows:
            later = min((pp - 1) * height, max(0, dense + work - least - height))
            time = max(time, outer * work + drain * height - forward * later)
        times.append(time)
    return min(times)


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
    """The index of the tallest in the grid."""
    low: int
    """The lowest height."""
    equal: int
    """Rounds that are as tall as the tallest before they fall."""
    rounds: int
    """Rounds from the last of these to the lowest."""

    def target(self, tallest: int, number: int) -> int:
        """The height of one round; beyond the last they stay at the lowest."""
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
        """The area of each item; NEVER where it cannot be split far enough."""
        problem = self.problem
        areas = problem.least_area.copy()
        tall = problem.natural > cost
        legal = problem.cost[tall] <= cost
        areas[tall] = np.where(legal, problem.area[tall], NEVER).min(axis=1)
        return areas

    def tops(self) -> list[int]:
        """Indices of the heights that the tallest round may have."""
        return [i for i, height in enumerate(self.heights) if height >= self.least]

    def tall_until(self, top: int) -> list[int]:
        """For each height up to `top`, one past the last item that is too long for it."""
        limit = self.areas[top] * WORTH_A_SPLIT
        tall = [np.flatnonzero(areas > limit) for areas in self.areas[: top + 1]]
        return [int(items[-1]) + 1 if len(items) else 0 for items in tall]

    def needed(self, tall_until: list[int], longest: int) -> int:
        """The least height for which an item, and all that are shorter, are not too long."""
        # The ends in `tall_until` fall while heights rise.
        first = bisect_left(tall_until, -longest, key=lambda until: -until)
        height: int = self.heights[min(first, len(tall_until) - 1)]
        return height

    def level_height(self, rounds: int) -> int:
        """The least height, by area, of this many equal rounds."""
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
        self.round_tokens = problem.lanes * problem.capacity * FULL

    def falls(self, pp: int) -> Iterator[Fall]:
        """Different ways down from the tallest height."""
        problem, tallest = self.grid.problem, self.grid.heights[self.top]
        work = self.area[-1] / problem.lanes
        by_tokens = self.tokens[-1] / self.round_tokens
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
            if last < len(self.tokens) and self.tokens[last] - before > self.round_tokens:
                last = max(item + 1, bisect_left(self.tokens, before + self.round_tokens))
                after = max(area + 1.0, min(after, self.area[last - 1]))
            heights.append(int((after - area) / problem.lanes) + problem.pack)
            area, item = after, min(last, len(self.area) - 1)
        return heights


def rough_time(heights: list[int], *, pp: int, vpp: int) -> float:
    """Work, and what the pipeline adds: less where heights fall evenly."""
    falling = sorted(heights, reverse=True)
    jump = max((a - b for a, b in zip(falling, falling[2:], strict=False)), default=0)
    added = 0.4 * falling[0] + 0.6 * min(falling[0], falling[-1] + jump)
    return sum(heights) + added * (pp - 1) / vpp


def search_pipeline(problem: Problem, time: Time, *, bound: int, pp: int, vpp: int) -> Draft:
    """The fastest draft of the best guesses. bound: quanta that no rounds together go below.

    In a pipeline the tallest round costs most, because other ranks wait while it runs through the
    stages. The first and the last round cost too, while the pipeline fills and drains. So rounds
    run from low to tall and back to low, and neighbours should be nearly as tall as each other: on
    4 ranks 32 equal rounds take 9 % more than their work, 32 whose heights fall evenly from a
    tallest to almost nothing 7 %, though their tallest is twice as tall, and 30 equal ones with 2
    such tall ones 19 %.

    Two heights are chosen from a grid. `top` is the most that a round costs: low, and long items
    must be split further and exchange more. From there heights fall evenly to `low`, but stay
    higher while items are left that could be split so far only with waste. The best pairs by area
    alone are walked, and the best of these are filled for real, the longest items first. Equal
    rounds, one or two for each rank, are tried besides.
    """
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
    # Of equal ones the first guess comes first, both times.
    guesses.sort(key=lambda entry: entry[:2])
    walked = [(time(heights), number, fall) for _, number, fall, heights in guesses[:GUESSES]]
    walked.sort(key=lambda entry: entry[:2])
    drafts = [fill_fall(grid, fall) for _, _, fall in walked[:FILLINGS]]
    best = min(drafts, key=lambda draft: time(draft.heights))
    for rounds in (pp, 2 * pp):
        best = fill_level_rounds(grid, rounds, time, best)
    return fewest_rounds(problem, time, best, bound=bound, pp=pp)


def fewest_rounds(problem: Problem, time: Time, best: Draft, *, bound: int, pp: int) -> Draft:
    """The rounds of a step without a pipeline, if they are fewer than ranks and faster.

    On 1024 lanes one round of 14,107, four ranks long, beats any cut of it into several whose
    tallest is hardly lower.
    """
    rounds = least_rounds(problem, np.arange(len(problem.cost)))
    fastest = time(best.heights)
    if rounds >= pp or time([bound // rounds] * rounds) >= fastest:
        return best
    draft = search_rounds(problem, bound=bound)
    return draft if time(draft.heights) < fastest else best


def fill_level_rounds(grid: HeightGrid, rounds: int, time: Time, best: Draft) -> Draft:
    """This many rounds of one height, as low as all items fit into, if that is faster."""
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
