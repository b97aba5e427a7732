"""What a policy is given: the step to be planned, and a place to offer rounds to.

In: a Task, whose costs and tokens are known for every legal CP size. Out: the fastest rounds that
were offered to its Choice. On 2 lanes of 8 tokens two sequences of 6 and 3 tokens can run side by
side, or one after the other; whichever way costs less stays in the Choice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longshore.plan.bound import UNLIMITED, step_bound
from longshore.plan.cost import CostTable
from longshore.plan.pipeline import arrange, line_up_quickly, quick_finish
from longshore.plan.pipeline_times import RoundColumns
from longshore.plan.simulate import columns_for, lane_costs, step_time, walk_rounds
from longshore.plan.types import Pack, PlanSetting, Round

GOOD_PIPELINE = 1.1
"""A pipeline's plan of a step that is not small is good this close to its bound."""
SMALL_STEP = 64
"""Sequences."""
Rounds = tuple[Round, ...]


@dataclass(frozen=True)
class Task:
    """A step to be planned."""

    setting: PlanSetting
    """What the plan was asked for."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, in the order they came; a sequence is named by its place here."""
    table: CostTable
    """Costs and tokens, a row for each sequence."""
    capacity: int
    """The most tokens a lane holds in a round, after alignment."""
    cp_size: int
    """The one CP size that a policy must use, or 0."""
    packs: tuple[tuple[int, ...], ...]
    """The caller's packs, for a policy that needs them."""
    pack_sizes: tuple[int, ...] = ()
    """The CP size of each of these packs, or 0: the policy chooses."""
    rounds: list[list[tuple[int, int, Iterable[int]]]] | None = None
    """The caller's rounds instead: (first lane, CP size, sequences) of each pack."""

    @property
    def lanes(self) -> int:
        return self.setting.lanes

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The legal CP sizes, rising."""
        return self.table.sizes

    @cached_property
    def by_length(self) -> list[int]:
        order: list[int] = np.argsort(-self.table.tokens[:, 0], kind="stable").tolist()
        return order

    @cached_property
    def _token_columns(self) -> dict[int, list[int]]:
        return {}

    @cached_property
    def columns(self) -> RoundColumns:
        """What rounds cost the stages of a pipeline."""
        return columns_for(self.setting, self.table)

    @cached_property
    def bound(self) -> int:
        """A time that no plan can beat, in 1/whole quanta."""
        return step_bound(self.setting, self.table, capacity=self.capacity)

    @cached_property
    def tokenwise(self) -> int:
        """Quanta of a token that have a maximum of their own; 0 where lanes meet after rounds."""
        setting, shares = self.setting, self.setting.shares
        if not setting.synced:
            return 0
        whole = sum(shares.forward_linear) + sum(shares.backward_linear)
        quanta = int(setting.profile.linear * self.table.scale)
        return quanta * sum(shares.tokenwise) // max(1, whole)

    def finish(self, heights: list[int]) -> int:
        """About when a pipeline is done with rounds of these heights, in 1/whole quanta."""
        setting = self.setting
        return quick_finish(heights, setting.shares, pp=setting.pp, vpp=setting.vpp)

    def tokens_at(self, cp_size: int) -> list[int]:
        """Tokens of every sequence on each lane at this CP size."""
        if cp_size not in self._token_columns:
            column = self.table.tokens[:, self.table.sizes.index(cp_size)]
            self._token_columns[cp_size] = column.tolist()
        return self._token_columns[cp_size]

    def costs_at(self, cp_size: int) -> list[int]:
        """What every sequence costs each lane at this CP size, in units of equal time."""
        costs: list[int] = self.table.cost[:, self.table.sizes.index(cp_size)].tolist()
        return costs

    @property
    def most_sequences(self) -> int:
        """Of a lane in a round."""
        return self.setting.max_sequences or UNLIMITED

    def given_table(self) -> CostTable:
        """Costs and tokens of the caller's packs; a CP size that a pack may not have never fits."""
        table = self.table.joined(self.packs)
        asked, sizes = np.array(self.pack_sizes)[:, None], np.array(table.sizes)
        return table.only((asked == 0) | (asked == sizes))

    def sizes_that_fit(self) -> tuple[int, ...]:
        """The CP sizes at which every sequence fits, or the one asked for."""
        if self.cp_size:
            return (self.cp_size,)
        widest = self.table.tokens.max(axis=0)
        return tuple(k for k, n in zip(self.table.sizes, widest, strict=True) if n <= self.capacity)

    def least_time(self, cp_size: int) -> int:
        """Quanta that no plan with just this CP size can beat."""
        column = self.table.cost[:, self.table.sizes.index(cp_size)]
        work = int(column.sum()) // (self.setting.lanes // cp_size) + self.table.pack
        # A pipeline takes the longest sequence's round through all ranks.
        return max(work, self.setting.pp * (int(column.max()) + self.table.pack))


class Choice:
    """The fastest rounds offered so far; the first of equals stays."""

    def __init__(self, task: Task, *, may_split: bool) -> None:
        self.task = task
        self.may_split = may_split
        self.rounds: Rounds = ()
        self.time: int | None = None

    def offer(self, rounds: Rounds) -> int:
        """Keeps the rounds if they are the fastest; returns their time in 1/whole quanta."""
        setting, table = self.task.setting, self.task.table
        if setting.pp > 1:
            rounds = self._arranged(rounds) if self.is_small else self._lined_up(rounds)
            time = walk_rounds(rounds, setting, self.task.columns).finish
        elif setting.synced:
            time = sum(self.task.columns.heights(rounds, pp=1))
        else:
            costs = lane_costs(rounds, table, setting.lanes)
            time = step_time(costs, rounds, table, setting.sync) * setting.shares.whole
        if self.time is None or time < self.time:
            self.rounds, self.time = rounds, time
        return time

    @property
    def is_small(self) -> bool:
        """Whether everything offered to a pipeline is arranged as well as what is kept."""
        return len(self.task.lengths) <= SMALL_STEP

    def settle(self) -> Rounds:
        """The fastest rounds; for a pipeline in the best order and cut where that helps."""
        if self.task.setting.pp > 1 and not self.is_small:
            self.rounds = self._arranged(self.rounds)
        return self.rounds

    def _lined_up(self, rounds: Rounds) -> Rounds:
        setting = self.task.setting
        return line_up_quickly(rounds, self.task.columns, pp=setting.pp, vpp=setting.vpp)

    def _arranged(self, rounds: Rounds) -> Rounds:
        setting = self.task.setting
        return arrange(
            rounds,
            table=self.task.table,
            lanes=setting.lanes,
            pp=setting.pp,
            vpp=setting.vpp,
            may_split=self.may_split,
            shares=setting.shares,
            synced=setting.synced,
        )

    def is_good(self) -> bool:
        """Whether a pipeline's plan is so near to its bound that other policies are not tried."""
        if self.is_small or self.time is None or self.task.setting.pp == 1:
            return False
        return self.time <= self.task.bound * GOOD_PIPELINE

    def could_gain(self, least: int) -> bool:
        """Whether a plan of at least this many quanta could be faster than the best."""
        return self.time is None or least * self.task.setting.shares.whole < self.time


def make_pack(task: Task, first_lane: int, cp_size: int, sequences: tuple[int, ...]) -> Pack:
    column = task.tokens_at(cp_size)
    return Pack(first_lane, cp_size, sequences, sum(map(column.__getitem__, sequences)))
