"""Divides the packs of a round over two rounds, alike on every lane, for a pipeline's sake.

In: a round. Out: two rounds with their columns. A lane whose pack has sequences of costs 5, 3 and 3
keeps the 5 in the first and has both 3 in the second.
"""

import numpy as np

from longshore.plan.cost import CostTable, Ints
from longshore.plan.round_columns import RoundColumns
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
