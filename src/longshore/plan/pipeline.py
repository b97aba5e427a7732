"""Makes the rounds of a step fit a pipeline: their number legal, their order and size short to run.

In: rounds, their costs, the pipeline size and the stages per rank. Out: the same work as rounds
that interleaving accepts (a multiple of pp when vpp > 1), arranged so that the simulated step is
short. Everything is tried on the simulator, and the result is never slower than the rounds with
work as they came, followed by the empty ones they need.

Rounds of heights 9, 3 and 3 on two ranks of one stage take 24 quanta, 15 of work and 9 of bubble;
as 3, 9, 3 they take 21. With two stages per rank a fourth round is needed: with an empty one at the
end 9, 3, 3 takes 22, and with the first cut in two, as 5, 4, 3, 3, it takes 17.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from longshore.plan.cost import CostTable, Ints
from longshore.plan.pipeline_times import finish_times, wait_graph
from longshore.plan.simulate import PackCosts, round_heights
from longshore.plan.types import Pack, Round

# Effort, counted in actions walked and never in time, so that every rank decides alike.
ORDER_ACTIONS = 1_000_000
BATCH_ACTIONS = 300_000
SPLIT_ACTIONS = 8_000
SPLIT_GENERATIONS = 8
# Up to so many rounds, every number of rounds to cut is tried.
FEW_ROUNDS = 6
# A bubble of less than one part in 50 of the work is not worth more rounds.
SMALL_BUBBLE = 50
# One part in 200 is not worth a search: a finish so near the bound, a gain so small.
CLOSE = 200


@dataclass(frozen=True, slots=True)
class Pipe:
    """The pipeline, and how many bits heights lose so that times stay inside 64."""

    pp: int
    vpp: int
    shift: int

    def legal(self, rounds: int) -> int:
        """The smallest number of rounds, at least this many, that the pipeline runs."""
        return rounds if self.vpp == 1 else -(-rounds // self.pp) * self.pp

    def actions(self, rounds: int) -> int:
        return 2 * rounds * self.pp * self.vpp

    def finishes(self, heights: Ints) -> Ints:
        return finish_times(wait_graph(heights.shape[1], pp=self.pp, vpp=self.vpp), heights)


@dataclass(frozen=True, slots=True)
class Lineup:
    """Rounds in the order they run, their heights (shifted) and the finish of their walk."""

    rounds: tuple[Round, ...]
    heights: tuple[int, ...]
    finish: int


def arrange(
    rounds: Seq[Round], *, table: CostTable, lanes: int, pp: int, vpp: int, may_split: bool
) -> tuple[Round, ...]:
    """The rounds as the pipeline should run them, their number legal for it.

    `may_split` allows to divide the packs of a round over two rounds; without it rounds are only
    reordered, and empty ones added or left out. Without a pipeline they stay as they are. Equal
    input gives equal output everywhere.
    """
    if pp == 1 or not rounds:
        return tuple(rounds)
    work = [round_ for round_ in rounds if round_.packs] or list(rounds[:1])
    heights = round_heights(work, table, lanes)
    total = sum(heights) + (pp - 1) * table.round
    # No finish is later than pp·vpp·3·(sum of heights), and no split is walked whose work alone
    # exceeds the finish it has to beat: 3·vpp·(sum of its heights) < 3·pp·vpp·total.
    pipe = Pipe(pp, vpp, max(0, (3 * pp * pp * vpp * total).bit_length() - 63))
    empty = table.round >> pipe.shift
    start = [(round_, height >> pipe.shift) for round_, height in zip(work, heights, strict=True)]
    lineups = _lineups(start, pipe, empty)
    given, whole = lineups[0], min(lineups, key=_finish)
    lineup = _improve(whole, pipe)
    if may_split:
        splitter = _Splitter(table, lanes, pipe.shift)
        cut = _split_while_faster(whole, pipe, splitter, empty)
        lineup = lineup if cut is whole else min(lineup, _improve(cut, pipe), key=_finish)
    # The shift has taken less than two units from each action, so a larger gain is a true one.
    lost = 2 * pipe.actions(len(lineup.rounds)) if pipe.shift else 0
    return lineup.rounds if lineup.finish + lost < given.finish else given.rounds


def _finish(lineup: Lineup) -> int:
    return lineup.finish


Item = tuple[Round, int]


def _lineups(items: Seq[Item], pipe: Pipe, empty: int) -> list[Lineup]:
    """A few orders, as given first, after adding the empty rounds that make the number legal."""
    filled = [*items, *[(Round(()), empty)] * (pipe.legal(len(items)) - len(items))]
    heights = np.array([height for _, height in filled], dtype=np.int64)
    orders = np.array(_shapes(heights.tolist()))
    finishes = pipe.finishes(heights[orders]).tolist()
    lineups = []
    for order, finish in zip(orders.tolist(), finishes, strict=True):
        rounds, ordered = zip(*(filled[i] for i in order), strict=True)
        lineups.append(Lineup(rounds, ordered, finish))
    return lineups


def _shapes(heights: list[int]) -> list[list[int]]:
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
    bound, actions = _bound(lineup.heights, pipe), pipe.actions(len(lineup.heights))
    most = ORDER_ACTIONS // actions
    if (lineup.finish - bound) * CLOSE <= bound or most < len(lineup.heights):
        return lineup
    heights = np.array(lineup.heights, dtype=np.int64)
    if math.factorial(len(heights)) <= most:
        order, finish = _best_of_all(heights, pipe)
    else:
        order, finish = _local_search(heights, pipe, most)
    if finish >= lineup.finish:
        return lineup
    chosen = order.tolist()
    ordered = tuple(lineup.heights[i] for i in chosen)
    return Lineup(tuple(lineup.rounds[i] for i in chosen), ordered, finish)


def _best_of_all(heights: Ints, pipe: Pipe) -> tuple[Ints, int]:
    """The best of all orders, and its finish."""
    orders = np.array(list(permutations(range(len(heights)))))
    finishes = pipe.finishes(heights[orders])
    best = int(np.argmin(finishes))
    return orders[best], int(finishes[best])


def _local_search(heights: Ints, pipe: Pipe, most: int) -> tuple[Ints, int]:
    """The best that swaps and moves reach from a few orders, in at most about `most` walks."""
    shapes = np.array(_shapes(heights.tolist()))
    finishes = pipe.finishes(heights[shapes])
    neighbours = _neighbours(len(heights), most)
    best, lowest = shapes[0], int(finishes[0])
    for start in np.argsort(finishes, kind="stable").tolist():
        order, finish = shapes[start], int(finishes[start])
        order, finish, most = _descend(heights, order, finish, neighbours, pipe, most)
        if finish < lowest:
            best, lowest = order, finish
    return best, lowest


def _descend(
    heights: Ints, order: Ints, finish: int, neighbours: Ints, pipe: Pipe, most: int
) -> tuple[Ints, int, int]:
    """Goes to better neighbours while there are any; also returns the walks left of `most`."""
    batch = max(1, BATCH_ACTIONS // pipe.actions(len(heights)))
    first = 0
    while most > 0 and first < len(neighbours):
        tried = order[neighbours[first : first + batch]]
        finishes = pipe.finishes(heights[tried])
        most -= len(tried)
        first += batch
        best = int(np.argmin(finishes))
        if finishes[best] < finish:
            order, finish, first = tried[best], int(finishes[best]), 0
    return order, finish, most


def _bound(heights: Seq[int], pipe: Pipe) -> int:
    """A finish that no order of these rounds can beat.

    The last rank waits for the first round's forwards before it and the last round's backwards
    after it; and one round runs through all stages and back.
    """
    rising = sorted(heights)
    ends = 2 * rising[0] + rising[min(1, len(rising) - 1)]
    bound = 3 * pipe.vpp * sum(heights) + (pipe.pp - 1) * ends
    return max(bound, 3 * pipe.vpp * pipe.pp * rising[-1])


def _neighbours(rounds: int, most: int) -> Ints:
    """Swaps of two places and moves from one place to another, evenly thinned to `most` rows."""
    first, second = np.divmod(np.arange(rounds * rounds), rounds)
    swaps, moves = second > first, abs(first - second) > 1
    kinds = np.repeat([0, 1], [swaps.sum(), moves.sum()])
    pairs = np.concatenate([np.argwhere(swaps), np.argwhere(moves)])[:, 0]
    kept = np.arange(0, len(pairs), max(1, -(-len(pairs) // max(1, most))))
    i, j = first[pairs[kept], None], second[pairs[kept], None]
    place = np.arange(rounds)[None, :]
    swapped = np.where(place == i, j, np.where(place == j, i, place))
    shifted = place + ((place >= i) & (place < j)) - ((place <= i) & (place > j))
    moved = np.where(place == j, i, shifted)
    rows: Ints = np.where(kinds[kept, None] == 0, swapped, moved)
    return rows


class _Splitter:
    """Divides the packs of a round over two rounds, alike on every lane."""

    def __init__(self, table: CostTable, lanes: int, shift: int) -> None:
        self._table, self._lanes, self._shift = table, lanes, shift
        self._costs = PackCosts(table)
        self._tokens: dict[int, list[int]] = {
            size: table.tokens[:, j].tolist() for j, size in enumerate(table.sizes)
        }
        self._done: dict[int, tuple[Round, tuple[Item, Item]]] = {}

    def halves(self, round_: Round) -> tuple[Item, Item]:
        """The two rounds with their shifted heights; the second is empty if nothing divides."""
        # Rounds are kept beside their halves, so no other round can take over an id.
        if id(round_) not in self._done:
            sides, tops = self._sides(round_)
            first, second = (
                (self._build(round_, side), (top + self._table.round) >> self._shift)
                for side, top in zip(sides, tops, strict=True)
            )
            self._done[id(round_)] = round_, (first, second)
        return self._done[id(round_)][1]

    def _sides(self, round_: Round) -> tuple[list[list[set[int]]], list[int]]:
        """Which sequences of each pack go to either side, expensive ones first; both heights."""
        by_cost = sorted(
            (-self._costs.column(pack.cp_size)[sequence], number, sequence)
            for number, pack in enumerate(round_.packs)
            for sequence in pack.sequences
        )
        sides: list[list[set[int]]] = [[set() for _ in round_.packs] for _ in range(2)]
        loads = [[0] * self._lanes for _ in range(2)]
        for negative, number, sequence in by_cost:
            pack = round_.packs[number]
            first, stop = pack.first_lane, pack.first_lane + pack.cp_size
            new = [-negative if side[number] else self._table.pack - negative for side in sides]
            right = max(loads[1][first:stop]) + new[1] < max(loads[0][first:stop]) + new[0]
            sides[right][number].add(sequence)
            load, cost = loads[right], new[right]
            for lane in range(first, stop):
                load[lane] += cost
        return sides, [max(load) for load in loads]

    def _build(self, round_: Round, side: list[set[int]]) -> Round:
        packs = []
        for pack, kept in zip(round_.packs, side, strict=True):
            if kept:
                column = self._tokens[pack.cp_size]
                sequences = tuple(i for i in pack.sequences if i in kept)
                tokens = sum(map(column.__getitem__, sequences))
                packs.append(Pack(pack.first_lane, pack.cp_size, sequences, tokens))
        return Round(tuple(packs))


def _split_while_faster(lineup: Lineup, pipe: Pipe, splitter: _Splitter, empty: int) -> Lineup:
    """Cuts the highest rounds in two, some or all of them, as long as the finish falls."""
    for _ in range(SPLIT_GENERATIONS):
        work = 3 * pipe.vpp * sum(lineup.heights)
        if (lineup.finish - work) * SMALL_BUBBLE < work:
            break
        tried = [lineup]
        for items in _proposals(lineup, pipe, splitter):
            heights = [height for _, height in items]
            if pipe.actions(len(items)) <= SPLIT_ACTIONS and _bound(heights, pipe) < lineup.finish:
                tried += _lineups(items, pipe, empty)
        best = min(tried, key=_finish)
        gain, lineup = lineup.finish - best.finish, best
        if gain * CLOSE <= lineup.finish:
            break
    return lineup


def _proposals(lineup: Lineup, pipe: Pipe, splitter: _Splitter) -> Iterator[list[Item]]:
    """The rounds with work, with different numbers of the highest cut in two."""
    items = [item for item in zip(lineup.rounds, lineup.heights, strict=True) if item[0].packs]
    by_height = sorted(range(len(items)), key=lambda i: -items[i][1])
    splittable = [i for i in by_height if sum(len(p.sequences) for p in items[i][0].packs) > 1]
    for count in _counts(len(items), len(splittable), pipe):
        cut = set(splittable[:count])
        yield [
            piece
            for i, item in enumerate(items)
            for piece in (splitter.halves(item[0]) if i in cut else (item,))
            if piece[0].packs
        ]


def _counts(rounds: int, splittable: int, pipe: Pipe) -> list[int]:
    """How many rounds to cut: few are tried one by one, of many all and half."""
    few = splittable <= FEW_ROUNDS
    some = set(range(1, splittable + 1)) if few else {splittable, splittable // 2}
    if pipe.vpp > 1:
        # Beside them the next numbers that need no empty rounds.
        some |= {count - (rounds + count) % pipe.pp for count in some}
        some |= {count + -(rounds + count) % pipe.pp for count in some}
    return sorted(count for count in some if 0 < count <= splittable)
