"""Walks a plan and an order of work into times.

In: rounds with a cost table, or a whole plan. Out: the step's time as an exact integer, or a
timeline in seconds with the shares lost to waiting, to the pipeline's bubble and to padding.

Lanes: two rounds whose lanes cost (5, 3) and (2, 4), nothing shared, no `round` cost. Sync `round`
waits after each round: 5 + 4 = 9. Sync `step` waits at the end only: max(5 + 2, 3 + 4) = 7.

Pipeline: a round's height is the cost of its slowest lane plus `round`. It keeps every pipeline
rank busy that long, a third of it in forwards, two thirds in backwards, split evenly over the
rank's stages. Times are whole numbers of 1/(3·vpp) quantum, so a stage's forward takes `height`
units and its backward 2·height. Two rounds of height 6 on two ranks of one stage finish after
(2 + 1)·6 = 18 quanta, which are 54 units.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from longshore.plan.cost import CostTable, Ints
from longshore.plan.order import Kind, Order, make_order
from longshore.plan.types import Pack, Plan, Round, Setting


@dataclass(frozen=True, slots=True)
class Event:
    """One action of a pipeline rank, in units of 1/(3·vpp) quantum."""

    rank: int
    stage: int
    round: int
    kind: Kind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Walk:
    """An order with the times its actions start and end, in units of 1/(3·vpp) quantum."""

    order: Order
    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    finish: int

    def events(self) -> Iterator[Event]:
        """Every action with its times, rank after rank, in the order they run."""
        times = zip(self.order, self.starts, self.ends, strict=True)
        for rank, (actions, starts, ends) in enumerate(times):
            for action, start, end in zip(actions, starts, ends, strict=True):
                yield Event(rank, action.stage, action.round, action.kind, start, end)


def walk(order: Order, heights: Seq[int], *, pp: int, vpp: int) -> Walk:
    """Runs every action as early as its rank and its dependencies allow.

    A forward waits for the same round's forward on the stage before, a backward for the backward
    on the stage after, the last stage's backward for its own forward.
    """
    stages = pp * vpp
    durations = [*heights] * stages + [2 * height for height in heights] * stages
    starts, ends = _run(_links(order, rounds=len(heights), stages=stages), durations)
    _refuse_deadlock(order, ends)
    finish = max(ended[-1] for ended in ends)
    return Walk(order, tuple(map(tuple, starts)), tuple(map(tuple, ends)), finish)


Links = list[list[tuple[int, int]]]


def _links(order: Order, *, rounds: int, stages: int) -> Links:
    """For each rank's actions, the slot whose end they wait for and the slot they fill.

    Slots count the forwards stage by stage, then the backwards; −1 is a slot that is always full.
    """
    turn = (stages - 1) * rounds
    links: Links = []
    for actions in order:
        rank: list[tuple[int, int]] = []
        for action in actions:
            place = action.stage * rounds + action.round
            if action.kind == "forward":
                rank.append((place - rounds if place >= rounds else -1, place))
            else:
                filled = stages * rounds + place
                rank.append((place if place >= turn else filled + rounds, filled))
        links.append(rank)
    return links


def _run(links: Links, durations: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Start and end of every action that can run, rank by rank."""
    pp = len(links)
    full = [-1] * len(durations) + [0]
    starts: list[list[int]] = [[] for _ in links]
    ends: list[list[int]] = [[] for _ in links]
    waiting = list(range(pp - 1, -1, -1))
    while waiting:
        rank = waiting.pop()
        todo, begun, ended = links[rank], starts[rank], ends[rank]
        first = at = len(ended)
        now = ended[-1] if ended else 0
        while at < len(todo):
            needed, filled = todo[at]
            ready = full[needed]
            if ready < 0:
                break
            start = ready if ready > now else now
            full[filled] = now = start + durations[filled]
            begun.append(start)
            ended.append(now)
            at += 1
        # Only neighbours wait for a rank, so asking them after each advance reaches everyone.
        if at > first:
            waiting += [r for r in {(rank - 1) % pp, (rank + 1) % pp} if r not in waiting]
    return starts, ends


def _refuse_deadlock(order: Order, ends: list[list[int]]) -> None:
    for rank, (actions, ended) in enumerate(zip(order, ends, strict=True)):
        if len(ended) < len(actions):
            stuck = actions[len(ended)]
            raise ValueError(
                f"the order cannot run: rank {rank} waits for ever before its action {len(ended)}, "
                f"the {stuck.kind} of round {stuck.round} on stage {stuck.stage}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class WaitGraph:
    """Who waits for whom in an order, for walking many lists of heights at once.

    Actions are numbered level by level; those of a level depend on lower levels only. `before[i]`
    is the action the rank runs before action i, `needs[i]` the one whose result it waits for (−1:
    none), `round[i]` and `weight[i]` say that it takes weight·heights[round].
    """

    levels: tuple[slice, ...]
    before: Ints
    needs: Ints
    round: Ints
    weight: Ints


@lru_cache(maxsize=32)
def wait_graph(rounds: int, *, pp: int, vpp: int) -> WaitGraph:
    """The wait graph of `make_order`'s order."""
    stages = pp * vpp
    links = _links(make_order(rounds, pp=pp, vpp=vpp), rounds=rounds, stages=stages)
    # With every action one unit long, an action's start is the number of its level.
    starts, _ = _run(links, [1] * (2 * stages * rounds))
    level = np.array(starts, dtype=np.int64).ravel()
    needed, filled = np.array(links, dtype=np.int64).reshape(-1, 2).T
    by_level = np.argsort(level, kind="stable")
    number = np.empty(len(level) + 1, dtype=np.int64)
    number[by_level] = np.arange(len(level))
    number[-1] = -1
    action_at = np.full(len(level) + 1, -1, dtype=np.int64)
    action_at[filled] = number[:-1]
    previous = np.arange(len(level)) - 1
    previous[:: len(level) // pp] = -1
    edges = np.searchsorted(level[by_level], np.arange(level.max() + 2)).tolist()
    return WaitGraph(
        levels=tuple(slice(a, b) for a, b in pairwise(edges)),
        before=number[previous][by_level],
        needs=action_at[needed][by_level],
        round=(filled % rounds)[by_level],
        weight=(1 + filled // (stages * rounds))[by_level],
    )


def finish_times(graph: WaitGraph, heights: Ints) -> Ints:
    """The finish of `walk` for every row of heights at once.

    No time may leave 64 bits: 3·pp·vpp·Σ heights < 2⁶³ is enough.
    """
    columns = np.ascontiguousarray(heights.T)
    ends = np.empty((len(graph.round) + 1, columns.shape[1]), dtype=np.int64)
    ends[-1] = 0
    durations = columns[graph.round] * graph.weight[:, None]
    for level in graph.levels:
        out = ends[level]
        np.maximum(ends[graph.before[level]], ends[graph.needs[level]], out=out)
        out += durations[level]
    finish: Ints = ends.max(axis=0)
    return finish


def table_for(setting: Setting, lengths: Seq[int]) -> CostTable:
    """The costs a plan of this setting is judged by.

    Policy `padded` runs every sequence at the length of the longest, so its costs are equal.
    """
    array = np.array(lengths, dtype=np.int64)
    if setting.planned_by.pads_to_longest:
        array = np.full_like(array, array.max())
    return CostTable(array, sizes=setting.cp_sizes, profile=setting.profile)


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
        """What the round costs each lane, without the table's `round`."""
        row = [0] * lanes
        for pack in round_.packs:
            cost = self.of(pack)
            for lane in pack.lanes:
                row[lane] += cost
        return row


def lane_costs(rounds: Seq[Round], table: CostTable, lanes: int) -> list[list[int]]:
    """Quanta of each round's packs on each lane, without the table's `round`."""
    costs = PackCosts(table)
    return [costs.lanes(round_, lanes) for round_ in rounds]


def round_heights(rounds: Seq[Round], table: CostTable, lanes: int) -> list[int]:
    """Quanta that each round takes when lanes wait for each other after it."""
    return [max(row) + table.round for row in lane_costs(rounds, table, lanes)]


def step_time(costs: Seq[Seq[int]], rounds: Seq[Round], table: CostTable, sync: str) -> int:
    """Quanta of a step without a pipeline; `costs` are the rounds' lane_costs.

    Lanes that meet in a round (all of them in sync `round`, those joined through shared packs in
    sync `step`) start at their latest ready time and end together after their largest cost and the
    table's `round`. A lane that meets nobody keeps its ready time.
    """
    if sync == "round":
        return sum(map(max, costs)) + table.round * len(costs)
    ready = [0] * len(costs[0])
    for round_, row in zip(rounds, costs, strict=True):
        for meeting in _meetings(round_, len(row), sync):
            _meet(ready, row, meeting, table.round)
    return max(ready)


def _meetings(round_: Round, lanes: int, sync: str) -> list[range]:
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


def _meet(ready: list[int], row: Seq[int], meeting: range, overhead: int) -> int:
    """Moves the lanes' ready times past a round; returns when they started it."""
    part = slice(meeting.start, meeting.stop)
    start = max(ready[part])
    ready[part] = [start + max(row[part]) + overhead] * len(meeting)
    return start


@dataclass(frozen=True, slots=True)
class PackEvent:
    """A pack's time on its lanes, in seconds. `pack` is its place in the round."""

    round: int
    pack: int
    first_lane: int
    cp_size: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step in seconds.

    events: every pack, on the lanes of one pipeline rank with its rounds back to back.
    busy: each lane's packs and the `round` of each round it takes part in (sync `round`: all; sync
    `step`: those with work). idle: span − busy.
    span: the step without the pipeline's bubble. predicted: the step with it.
    imbalance: 1 − Σ busy / (lanes · span), the share of that span that lanes wait for lanes.
    bubble: 1 − span / predicted, the share of the step that a pipeline rank waits for others.
    padding: 1 − real tokens / all tokens, where a lane's tokens in a round count after alignment
    and a lane without work has none.
    walk: the pipeline's actions (None without a pipeline), one of whose units is `unit` seconds.
    """

    events: tuple[PackEvent, ...]
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    span: float
    predicted: float
    imbalance: float
    bubble: float
    padding: float
    walk: Walk | None
    unit: float


def simulate(plan: Plan) -> Timeline:
    lengths = [sequence.length for sequence in plan.sequences]
    table = table_for(plan.setting, lengths)
    return simulate_rounds(plan.rounds, setting=plan.setting, lengths=lengths, table=table)


def simulate_rounds(
    rounds: Seq[Round], *, setting: Setting, lengths: Seq[int], table: CostTable
) -> Timeline:
    """What `simulate` does, for rounds that are not a Plan yet; `table` comes from `table_for`."""
    lanes, costs = setting.lanes, PackCosts(table)
    rows = [costs.lanes(round_, lanes) for round_ in rounds]
    ready, busy = [0] * lanes, [0] * lanes
    events: list[PackEvent] = []
    for number, (round_, row) in enumerate(zip(rounds, rows, strict=True)):
        begin = [0] * lanes
        for meeting in _meetings(round_, lanes, setting.sync):
            start = _meet(ready, row, meeting, table.round)
            for lane in meeting:
                begin[lane] = start
                busy[lane] += row[lane] + table.round
        events += _pack_events(number, round_, begin, costs, table)
    span, parts = max(ready), 3 * setting.vpp
    walked = _pipeline(rows, setting, table)
    finish = walked.finish if walked else span * parts
    held = held_tokens(rounds, lanes=lanes, align=setting.align)
    return Timeline(
        events=tuple(events),
        busy=tuple(table.seconds(quanta) for quanta in busy),
        idle=tuple(table.seconds(span - quanta) for quanta in busy),
        span=table.seconds(span),
        predicted=finish / parts / table.scale,
        imbalance=1 - sum(busy) / (lanes * span) if span else 0.0,
        bubble=1 - span * parts / finish if finish else 0.0,
        padding=1 - sum(lengths) / held if held else 0.0,
        walk=walked,
        unit=1 / parts / table.scale,
    )


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


def _pipeline(costs: Seq[Seq[int]], setting: Setting, table: CostTable) -> Walk | None:
    if setting.pp == 1:
        return None
    heights = [max(row) + table.round for row in costs]
    order = make_order(len(heights), pp=setting.pp, vpp=setting.vpp)
    return walk(order, heights, pp=setting.pp, vpp=setting.vpp)


def held_tokens(rounds: Seq[Round], *, lanes: int, align: int) -> int:
    """Tokens of all lanes in all rounds, each lane's total rounded up to `align`."""
    total = 0
    for round_ in rounds:
        row = [0] * lanes
        for pack in round_.packs:
            for lane in pack.lanes:
                row[lane] += pack.tokens_per_lane
        total += sum(-(-tokens // align) * align for tokens in row)
    return total
