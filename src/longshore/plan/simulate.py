"""Predicts how a plan runs: when each lane works and waits, and how long the step takes.

In: rounds with a cost table, or a whole plan. Out: the step's time as an exact integer, or a
simulated step in seconds with the shares lost to waiting, to the pipeline's bubble and to padding.

Two rounds whose lanes cost (5, 3) and (2, 4), nothing shared, no `round` cost. Sync `round` waits
after each round: 5 + 4 = 9. Sync `step` waits at the end only: max(5 + 2, 3 + 4) = 7. With a
pipeline plan/pipeline_times.py says when its ranks are done. Where experts are split over ranks,
plan/pipeline_times.py says what a round takes: its slowest mixers and its slowest experts.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from longshore.plan.cost import CostTable, LanePadding
from longshore.plan.layout import make_order
from longshore.plan.pipeline_times import RoundColumns, Walk, walk_columns
from longshore.plan.types import Pack, Plan, PlanSetting, Round


def table_for(setting: PlanSetting, lengths: Seq[int]) -> CostTable:
    """The costs a plan of this setting is judged by.

    Policy `padded` runs every sequence at the length of the longest, so its costs are equal.
    """
    array = np.array(lengths, dtype=np.int64)
    if setting.planned_by.pads_to_longest:
        array = np.full_like(array, array.max())
    return CostTable(
        array, sizes=setting.cp_sizes, profile=setting.profile, padding=setting.padding
    )


class PackCosts:
    """Costs of packs, with the table's columns as Python integers (a NumPy item costs 10 times)."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._columns: dict[int, list[int]] = {}

    def column(self, cp_size: int) -> list[int]:
        """Quanta of every sequence at this CP size."""
        if cp_size not in self._columns:
            values: list[int] = self._table.cost[:, self._table.sizes.index(cp_size)].tolist()
            self._columns[cp_size] = values
        return self._columns[cp_size]

    def of(self, pack: Pack) -> int:
        column = self.column(pack.cp_size)
        return self._table.pack + sum(map(column.__getitem__, pack.sequences))

    def lanes(self, round_: Round, lanes: int) -> list[int]:
        """What the round costs each lane, padding included, without the table's `round`."""
        row = [0] * lanes
        for pack in round_.packs:
            cost = self.of(pack)
            for lane in pack.lanes:
                row[lane] += cost
        if self._table.padding:
            _, linear, quadratic = self._table.lane_padding(np.array(lane_tokens(round_, lanes)))
            row = [
                cost + more for cost, more in zip(row, (linear + quadratic).tolist(), strict=True)
            ]
        return row


def lane_costs(rounds: Seq[Round], table: CostTable, lanes: int) -> list[list[int]]:
    """Quanta of each round on each lane, without the table's `round`."""
    costs = PackCosts(table)
    return [costs.lanes(round_, lanes) for round_ in rounds]


def step_time(costs: Seq[Seq[int]], rounds: Seq[Round], table: CostTable, sync: str) -> int:
    """Quanta of a step without a pipeline; `costs` are the rounds' lane_costs.

    Lanes that meet in a round (all of them in sync `round`, those joined through shared packs in
    sync `step`) start at their latest ready time and end together after their largest cost and the
    table's `round`. A lane without work costs its padding alone.
    """
    if sync == "round":
        return sum(map(max, costs)) + table.round * len(costs)
    ready = [0] * len(costs[0])
    for round_, row in zip(rounds, costs, strict=True):
        met = meetings(round_, len(row), sync)
        for meeting in met:
            _meet(ready, meeting, max(row[meeting.start : meeting.stop]) + table.round)
        for lane in _without_work(met, row) if table.padding else ():
            ready[lane] += row[lane]
    return max(ready)


def meetings(round_: Round, lanes: int, sync: str) -> list[range]:
    """The lanes that wait for each other in a round: packs that overlap join theirs to one run."""
    if sync == "round":
        return [range(lanes)]
    runs: list[range] = []
    for pack in sorted(round_.packs, key=lambda pack: pack.first_lane):
        if runs and pack.first_lane < runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, pack.lanes.stop))
        else:
            runs.append(pack.lanes)
    return runs


def _without_work(met: Seq[range], row: Seq[int]) -> list[int]:
    """Lanes that are in no meeting and still cost something: they run a bucket of padding."""
    working = {lane for meeting in met for lane in meeting}
    return [lane for lane, cost in enumerate(row) if cost and lane not in working]


def _meet(ready: list[int], meeting: range, height: int) -> int:
    """Moves the lanes' ready times past a round of this height; returns when they started it."""
    part = slice(meeting.start, meeting.stop)
    start = max(ready[part])
    ready[part] = [start + height] * len(meeting)
    return start


@dataclass(frozen=True, slots=True)
class PackEvent:
    """A pack's time on its lanes."""

    round: int
    """The number of its round."""
    pack: int
    """Its place in the round."""
    first_lane: int
    """The first of its lanes."""
    cp_size: int
    """How many lanes share it."""
    start: float
    """In seconds."""
    end: float
    """In seconds."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step in seconds."""

    events: tuple[PackEvent, ...]
    """Every pack, on the lanes of one pipeline rank with its rounds back to back."""
    busy: tuple[float, ...]
    """Each lane's packs, and `round` for each round it joins (sync `step`: those with work)."""
    idle: tuple[float, ...]
    """span − busy."""
    span: float
    """The step without the pipeline's bubble."""
    predicted: float
    """The step with the bubble."""
    imbalance: float
    """1 − Σ busy / (lanes · span): the share of the span that lanes wait for lanes."""
    bubble: float
    """The share of the step that an average pipeline rank waits for others."""
    rank_bubbles: tuple[float, ...]
    """The same of each pipeline rank; () without a pipeline."""
    padding: float
    """1 − real tokens / all tokens, of lanes padded to `align` and to buckets."""
    walk: Walk | None
    """The pipeline's actions; None without a pipeline."""
    unit: float
    """Seconds of one unit of the walk."""


def simulate(plan: Plan) -> SimulatedStep:
    lengths = [sequence.length for sequence in plan.sequences]
    table = table_for(plan.setting, lengths)
    return simulate_rounds(plan.rounds, setting=plan.setting, lengths=lengths, table=table)


def simulate_rounds(
    rounds: Seq[Round], *, setting: PlanSetting, lengths: Seq[int], table: CostTable
) -> SimulatedStep:
    """What `simulate` does, for rounds that are not a Plan yet; `table` comes from `table_for`."""
    lanes, costs = setting.lanes, PackCosts(table)
    rows = [costs.lanes(round_, lanes) for round_ in rounds]
    columns, whole = columns_for(setting, table), setting.shares.whole
    synced = columns.heights(rounds, pp=setting.pp) if setting.synced else []
    ready, busy = [0] * lanes, [0] * lanes
    events: list[PackEvent] = []
    for number, (round_, row) in enumerate(zip(rounds, rows, strict=True)):
        begin = [0] * lanes
        met = meetings(round_, lanes, setting.sync)
        for meeting in met:
            height = max(row[meeting.start : meeting.stop]) + table.round
            start = _meet(ready, meeting, -(-synced[number] // whole) if synced else height)
            for lane in meeting:
                begin[lane] = start
                busy[lane] += row[lane] + table.round
        for lane in _without_work(met, row) if table.padding else ():
            ready[lane] += row[lane]
            busy[lane] += row[lane]
        events += _pack_events(number, round_, begin, costs, table)
    span = max(ready)
    walked = walk_rounds(rounds, setting, columns) if setting.pp > 1 else None
    finish = walked.finish if walked else sum(synced) or span * whole
    bubbles = walked.idle_shares() if walked else ()
    padded = total_lane_tokens(rounds, lanes=lanes, padding=setting.padding)
    return SimulatedStep(
        events=tuple(events),
        busy=tuple(table.seconds(quanta) for quanta in busy),
        idle=tuple(table.seconds(span - quanta) for quanta in busy),
        span=table.seconds(span),
        predicted=finish / whole / table.scale,
        imbalance=1 - sum(busy) / (lanes * span) if span else 0.0,
        bubble=sum(bubbles) / len(bubbles) if bubbles else 0.0,
        rank_bubbles=bubbles,
        padding=1 - sum(lengths) / padded if padded else 0.0,
        walk=walked,
        unit=1 / whole / table.scale,
    )


def round_seconds(plan: Plan) -> list[float]:
    """What each round takes an average pipeline rank where lanes meet inside the layers."""
    setting = plan.setting
    table = table_for(setting, [sequence.length for sequence in plan.sequences])
    heights = columns_for(setting, table).heights(plan.rounds, pp=setting.pp)
    return [height / setting.shares.whole / table.scale for height in heights]


def pipeline_walk(plan: Plan) -> Walk:
    """When the actions of a plan's pipeline run, by which ranks order their messages.

    Every action takes some time here, also where it costs nothing, as in an empty round.
    """
    setting = plan.setting
    table = table_for(setting, [sequence.length for sequence in plan.sequences])
    return walk_rounds(plan.rounds, setting, columns_for(setting, table), least=1)


def columns_for(setting: PlanSetting, table: CostTable) -> RoundColumns:
    return RoundColumns(table, lanes=setting.lanes, shares=setting.shares, synced=setting.synced)


def walk_rounds(
    rounds: Seq[Round], setting: PlanSetting, columns: RoundColumns, *, least: int = 0
) -> Walk:
    """least: of an action's duration."""
    stages = setting.pp * setting.vpp
    order = make_order(len(rounds), pp=setting.pp, vpp=setting.vpp)
    timed = [
        [max(least, time) for time in column[: 2 * stages]] + column[2 * stages :]
        for column in columns.of(rounds)
    ]
    return walk_columns(order, timed, stages=stages)


def _pack_events(
    number: int, round_: Round, begin: Seq[int], costs: PackCosts, table: CostTable
) -> list[PackEvent]:
    """The round's packs one after another on each lane, from the time each lane begins.

    A pack starts once the lane with the most cost before it is through. Groups that nest (all but
    odd CP sizes do) have no lane ahead of another; where they do not, the cost model lets packs
    overlap rather than end after the round, and so does this.
    """
    events = []
    spent = [0] * len(begin)
    for place, pack in enumerate(round_.packs):
        cost = costs.of(pack)
        start = begin[pack.first_lane] + max(spent[pack.first_lane : pack.lanes.stop])
        for lane in pack.lanes:
            spent[lane] += cost
        first, last = table.seconds(start), table.seconds(start + cost)
        events.append(PackEvent(number, place, pack.first_lane, pack.cp_size, first, last))
    return events


def total_lane_tokens(rounds: Seq[Round], *, lanes: int, padding: LanePadding) -> int:
    """Tokens of all lanes in all rounds, each lane's total with its padding."""
    rows = np.array([lane_tokens(round_, lanes) for round_ in rounds], dtype=np.int64)
    return int(padding.totals(rows).sum())


def lane_tokens(round_: Round, lanes: int) -> list[int]:
    """Tokens of each lane's packs."""
    row = [0] * lanes
    for pack in round_.packs:
        for lane in pack.lanes:
            row[lane] += pack.tokens_per_lane
    return row
