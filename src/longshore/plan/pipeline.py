"""Makes the rounds of a step fit a pipeline: their number legal, their order and size short to run.

In: rounds, their costs, the pipeline size and the stages per rank. Out: the same work as rounds
that interleaving accepts (a multiple of pp when vpp > 1), arranged so that the simulated step is
short. Everything is tried on the simulator, and the result is never slower than the rounds with
work as they came, followed by the empty ones they need.

Rounds of heights 9, 3 and 3 on two ranks of one stage take 24 quanta, 15 of work and 9 of bubble;
as 3, 9, 3 they take 21. With two stages per rank a fourth round is needed: with an empty one at the
end 9, 3, 3 takes 22, and with the first cut in two, as 5, 4, 3, 3, it takes 17.

Divides the packs of a round over two rounds, alike on every lane, for a pipeline's sake.

In: a round. Out: two rounds with their columns. A lane whose pack has sequences of costs 5, 3 and 3
keeps the 5 in the first and has both 3 in the second.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from longshore.plan.bound import order_bound
from longshore.plan.cost import CostTable, Ints, StageCosts, equal_stages
from longshore.plan.pipeline_times import RoundColumns, finish_times, wait_graph
from longshore.plan.types import Pack, Round

Item = tuple[Round, Ints]


class Splitter:
    """Divides the packs of a round over two rounds, alike on every lane."""

    def __init__(self, table: CostTable, lanes: int, maker: RoundColumns, shift: int) -> None:
        self._table, self._lanes, self._maker, self._shift = table, lanes, maker, shift
        self._costs = {size: table.cost[:, j].tolist() for j, size in enumerate(table.sizes)}
        self._tokens: dict[int, list[int]] = {
            size: table.tokens[:, j].tolist() for j, size in enumerate(table.sizes)
        }
        self._done: dict[int, tuple[Round, tuple[Item, Item]]] = {}

    def halves(self, round_: Round) -> tuple[Item, Item]:
        """The two rounds with their shifted columns; the second is empty if nothing divides."""
        # Rounds are kept beside their halves, so no other round can take over an id.
        if id(round_) not in self._done:
            first, second = (self._build(round_, side) for side in self._sides(round_))
            columns = np.array(self._maker.of([first, second]), dtype=object) >> self._shift
            one, two = columns.astype(np.int64)
            self._done[id(round_)] = round_, ((first, one), (second, two))
        return self._done[id(round_)][1]

    def _sides(self, round_: Round) -> list[list[set[int]]]:
        """Which sequences of each pack go to either side, expensive ones first."""
        by_cost = sorted(
            (-self._costs[pack.cp_size][sequence], number, sequence)
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
        return sides

    def _build(self, round_: Round, side: list[set[int]]) -> Round:
        packs = []
        for pack, kept in zip(round_.packs, side, strict=True):
            if kept:
                column = self._tokens[pack.cp_size]
                sequences = tuple(i for i in pack.sequences if i in kept)
                tokens = sum(map(column.__getitem__, sequences))
                packs.append(Pack(pack.first_lane, pack.cp_size, sequences, tokens))
        return Round(tuple(packs))


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
        """Of the rank that has most of it."""
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
    rounds: Seq[Round],
    *,
    table: CostTable,
    lanes: int,
    pp: int,
    vpp: int,
    may_split: bool,
    shares: StageCosts | None = None,
    synced: bool = False,
) -> tuple[Round, ...]:
    """The rounds as the pipeline should run them, their number legal for it.

    `may_split` allows to divide the packs of a round over two rounds; without it rounds are only
    reordered, and empty ones added or left out. Without a pipeline they stay as they are. Equal
    input gives equal output everywhere.
    """
    if pp == 1 or not rounds:
        return tuple(rounds)
    work = [round_ for round_ in rounds if round_.packs] or list(rounds[:1])
    shares = shares or equal_stages(pp, vpp)
    maker = RoundColumns(table, lanes=lanes, shares=shares, synced=synced)
    columns, pipe = shifted_columns(maker, work, pp=pp, vpp=vpp)
    lineups = line_up(list(zip(work, columns, strict=True)), pipe, maker)
    given, whole = lineups[0], min(lineups, key=_finish)
    lineup = _improve(whole, pipe)
    if may_split:
        splitter = Splitter(table, lanes, maker, pipe.shift)
        cut = _split_while_faster(whole, pipe, splitter, maker)
        lineup = lineup if cut is whole else min(lineup, _improve(cut, pipe), key=_finish)
    # The shift has taken less than two units from each action, so a larger gain is a true one.
    lost = 2 * pipe.actions(len(lineup.rounds)) if pipe.shift else 0
    return lineup.rounds if lineup.finish + lost < given.finish else given.rounds


def line_up_quickly(
    rounds: Seq[Round], maker: RoundColumns, *, pp: int, vpp: int
) -> tuple[Round, ...]:
    """The best of a few orders, with the empty rounds that the pipeline needs."""
    work = [round_ for round_ in rounds if round_.packs] or list(rounds[:1])
    columns, pipe = shifted_columns(maker, work, pp=pp, vpp=vpp)
    return min(line_up(list(zip(work, columns, strict=True)), pipe, maker), key=_finish).rounds


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


def shifted_columns(
    maker: RoundColumns, rounds: Seq[Round], *, pp: int, vpp: int
) -> tuple[list[Ints], Pipe]:
    """Columns that fit into 64 bits with all their sums, also with four times the work."""
    exact = maker.of(rounds)
    total = sum(map(sum, exact)) + (pp - 1) * sum(maker.of([Round(())])[0])
    pipe = Pipe(pp, vpp, max(0, (4 * total).bit_length() - 62))
    return [shifted(column, pipe.shift) for column in exact], pipe


def shifted(column: Seq[int], shift: int) -> Ints:
    return np.array([time >> shift for time in column], dtype=np.int64)


def _finish(lineup: Lineup) -> int:
    return lineup.finish


def line_up(items: Seq[Item], pipe: Pipe, maker: RoundColumns) -> list[Lineup]:
    """A few orders, as given first, after adding the empty rounds that make the number legal."""
    lacking = pipe.legal(len(items)) - len(items)
    empty = (Round(()), shifted(maker.of([Round(())])[0], pipe.shift)) if lacking else None
    filled = [*items, *([empty] * lacking if empty else [])]
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
        order, finish = _best_of_all(columns, pipe)
    else:
        order, finish = _local_search(columns, pipe, most)
    if finish >= lineup.finish:
        return lineup
    return Lineup(tuple(lineup.rounds[i] for i in order.tolist()), columns[order], finish)


def _best_of_all(columns: Ints, pipe: Pipe) -> tuple[Ints, int]:
    """The best of all orders, and its finish."""
    orders = np.array(list(permutations(range(len(columns)))))
    finishes = pipe.finishes(columns, orders)
    best = int(np.argmin(finishes))
    return orders[best], int(finishes[best])


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


def _split_while_faster(
    lineup: Lineup, pipe: Pipe, splitter: Splitter, maker: RoundColumns
) -> Lineup:
    """Cuts the longest rounds in two, some or all of them, as long as the finish falls."""
    for _ in range(SPLIT_GENERATIONS):
        work = pipe.work(lineup.columns)
        if (lineup.finish - work) * SMALL_BUBBLE < work:
            break
        tried = [lineup]
        for items in _proposals(lineup, pipe, splitter):
            columns = np.stack([column for _, column in items])
            few = pipe.actions(len(items)) <= SPLIT_ACTIONS
            if few and order_bound(columns, pp=pipe.pp) < lineup.finish:
                tried += line_up(items, pipe, maker)
        best = min(tried, key=_finish)
        gain, lineup = lineup.finish - best.finish, best
        if gain * CLOSE <= lineup.finish:
            break
    return lineup


def _proposals(lineup: Lineup, pipe: Pipe, splitter: Splitter) -> Iterator[list[Item]]:
    """The rounds with work, with different numbers of the longest cut in two."""
    items = [item for item in zip(lineup.rounds, lineup.columns, strict=True) if item[0].packs]
    if not items:
        return
    lengths = _lengths(np.stack([column for _, column in items]))
    by_length = sorted(range(len(items)), key=lambda i: -lengths[i])
    splittable = [i for i in by_length if sum(len(p.sequences) for p in items[i][0].packs) > 1]
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
