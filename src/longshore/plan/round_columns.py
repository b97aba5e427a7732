"""What a round costs each stage of a pipeline: its column for plan/pipeline_times.py.

In: rounds, a cost table and how stages share a round's cost. Out: for each round the durations of
its forward and backward on every stage, and of its messages, as exact integers.

A stage takes a round as long as its slowest lane. With 1/3 of the linear part and 1/2 of the
quadratic one, lanes of (6 linear, 4 quadratic) and (9, 1) take 2 + 2 = 4 and 3 + 0.5 = 3.5: the
first decides. A message has the rows of the fullest lane.

Where experts are split over ranks (`synced`), lanes meet before and after them. If all that is
linear is token-wise, mixers take 2 and 0.5, experts 2 and 3, and the stage 2 + 3 = 5.
"""

from collections.abc import Sequence as Seq

import numpy as np

from longshore.plan.cost import CostTable, Ints
from longshore.plan.stage_costs import StageCosts
from longshore.plan.types import Round

SAFE_BITS = 62


class RoundColumns:
    """Makes columns, and remembers the table's columns of each CP size."""

    def __init__(
        self, table: CostTable, *, lanes: int, shares: StageCosts, synced: bool = False
    ) -> None:
        """synced: lanes meet inside every layer, before what is token-wise and after it."""
        self._table, self._lanes, self._shares = table, lanes, shares
        linear = (*shares.forward_linear, *shares.backward_linear)
        quadratic = (*shares.forward_quadratic, *shares.backward_quadratic)
        tokenwise = shares.tokenwise if synced else [0] * len(linear)
        self._pairs = list(zip(linear, quadratic, tokenwise, strict=True))
        self._even = linear == quadratic and not synced
        self._parts: dict[int, tuple[list[int], list[int]]] = {}

    def of(self, rounds: Seq[Round]) -> list[list[int]]:
        """A column for each round: forwards, backwards, messages and a 0."""
        linear, quadratic, tokens, packs = self._lane_sums(rounds)
        heights: dict[tuple[int, int, int], list[int]] = {}
        if self._even:
            tops = (linear + quadratic + packs).max(axis=1)
            tallest = [int(top) + self._table.round for top in tops]
            heights = {pair: [pair[0] * top for top in tallest] for pair in set(self._pairs)}
        else:
            for pair in set(self._pairs):
                heights[pair] = _tallest(linear, quadratic, packs + self._table.round, pair)
        rows = self._messages(tokens)
        return [[*(heights[pair][i] for pair in self._pairs), *rows[i]] for i in range(len(rounds))]

    def _messages(self, tokens: Ints) -> list[list[int]]:
        streams, each = self._shares.streams[:-1], self._table.message * self._shares.whole
        rows = tokens.max(axis=1).tolist()
        return [[round(count * each * most) for count in streams] + [0] for most in rows]

    def heights(self, rounds: Seq[Round], *, pp: int) -> list[int]:
        """What each round takes an average rank, in 1/whole quanta."""
        actions = 2 * self._shares.stages
        return [-(-sum(column[:actions]) // pp) for column in self.of(rounds)]

    def _lane_sums(self, rounds: Seq[Round]) -> tuple[Ints, Ints, Ints, Ints]:
        """Quanta of the linear and the quadratic part, tokens, quanta of packs: [round, lane]."""
        changes = np.zeros((4, len(rounds), self._lanes + 1), dtype=np.int64)
        numbers, firsts, stops, sums = [], [], [], []
        for number, round_ in enumerate(rounds):
            for pack in round_.packs:
                whole, square = self._columns(pack.cp_size)
                cost = sum(map(whole.__getitem__, pack.sequences))
                part = 0 if self._even else sum(map(square.__getitem__, pack.sequences))
                numbers.append(number)
                firsts.append(pack.first_lane)
                stops.append(pack.first_lane + pack.cp_size)
                sums.append((cost - part, part, pack.tokens_per_lane, self._table.pack))
        if sums:
            values = np.array(sums, dtype=np.int64).T
            for change, value in zip(changes, values, strict=True):
                np.add.at(change, (numbers, firsts), value)
                np.subtract.at(change, (numbers, stops), value)
        linear, quadratic, tokens, packs = changes.cumsum(axis=2)[:, :, :-1]
        if self._table.padding:
            added, more_linear, more_quadratic = self._table.lane_padding(tokens)
            linear, quadratic = linear + more_linear, quadratic + more_quadratic
            tokens = tokens + added
        return linear, quadratic, tokens, packs

    def _columns(self, cp_size: int) -> tuple[list[int], list[int]]:
        if cp_size not in self._parts:
            whole: list[int] = self._table.cost[:, self._table.sizes.index(cp_size)].tolist()
            self._parts[cp_size] = whole, [] if self._even else self._table.quadratic(cp_size)
        return self._parts[cp_size]


def _tallest(linear: Ints, quadratic: Ints, fixed: Ints, parts: tuple[int, int, int]) -> list[int]:
    """How long each round takes with these parts of its linear and quadratic cost.

    fixed: quanta that do not grow with tokens, which go with the linear part. The last of the parts
    is what of the linear cost has a maximum of its own, none where it is 0.
    """
    most = max(parts) * sum(int(cost.max(initial=0)) for cost in (linear, quadratic, fixed))
    if most.bit_length() > SAFE_BITS:
        linear, quadratic, fixed = (cost.astype(object) for cost in (linear, quadratic, fixed))
    first, second, apart = parts
    mixers = (first - apart) * linear + first * fixed + second * quadratic
    tops = mixers.max(axis=1)
    if apart:
        tops = tops + (apart * linear).max(axis=1)
    return [int(top) for top in tops]
