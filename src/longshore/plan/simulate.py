"""Predicts how a plan runs: when each lane, stage and message runs, and how long the step takes.

In: rounds with a cost table, or a whole plan. Out: the step's time as an exact integer, a simulated
step with the shares lost to waiting, to the pipeline's bubble and to padding, a timeline to draw,
and what each pipeline rank does one after another.

Two rounds whose lanes cost (5, 3) and (2, 4), nothing shared, no `round` cost. Sync `round` waits
after each round: 5 + 4 = 9. Sync `step` waits at the end only: max(5 + 2, 3 + 4) = 7. In a pipeline
a round of height 6 takes, where all stages are alike, 6/3 in forwards and 12/3 in backwards of each
rank: two such rounds on two ranks of one stage finish after (2 + 1)·6 = 18.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import CostTable, Ints, LanePadding, StageCosts
from longshore.plan.layout import Action, Order, make_order
from longshore.plan.shapes import padded_length
from longshore.plan.types import Pack, Plan, PlanSetting, Round


def run_lengths(setting: PlanSetting, lengths: Seq[int]) -> Ints:
    """Tokens of each sequence as it runs: under policy `padded` all are as long as the longest."""
    array = np.array(lengths, dtype=np.int64)
    return np.full_like(array, array.max()) if setting.planned_by.pads_to_longest else array


def table_for(setting: PlanSetting, lengths: Seq[int]) -> CostTable:
    """The costs a plan of this setting is judged by."""
    return CostTable(
        run_lengths(setting, lengths),
        sizes=setting.cp_sizes,
        profile=setting.profile,
        padding=setting.padding,
    )


def plan_table(plan: Plan) -> CostTable:
    return table_for(plan.setting, [sequence.length for sequence in plan.sequences])


def make_pack(table: CostTable, first_lane: int, cp_size: int, sequences: tuple[int, ...]) -> Pack:
    tokens = sum(map(table.tokens_at(cp_size).__getitem__, sequences))
    return Pack(first_lane, cp_size, sequences, tokens)


def lane_costs(rounds: Seq[Round], table: CostTable, lanes: int) -> list[list[int]]:
    """Quanta of each round on each lane, padding included, without the table's `round`."""
    rows = []
    for round_ in rounds:
        row = [0] * lanes
        for pack in round_.packs:
            cost = table.pack + sum(map(table.costs_at(pack.cp_size).__getitem__, pack.sequences))
            for lane in pack.lanes:
                row[lane] += cost
        if table.padding:
            _, linear, quadratic = table.lane_padding(np.array(lane_tokens(round_, lanes)))
            row = [
                cost + more for cost, more in zip(row, (linear + quadratic).tolist(), strict=True)
            ]
        rows.append(row)
    return rows


def lane_tokens(round_: Round, lanes: int) -> list[int]:
    """Tokens of each lane's packs."""
    row = [0] * lanes
    for pack in round_.packs:
        for lane in pack.lanes:
            row[lane] += pack.tokens_per_lane
    return row


def total_lane_tokens(rounds: Seq[Round], *, lanes: int, padding: LanePadding) -> int:
    """Tokens of all lanes in all rounds, each lane's total with its padding."""
    rows = np.array([lane_tokens(round_, lanes) for round_ in rounds], dtype=np.int64)
    return int(padding.totals(rows).sum())


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


def _meet(ready: list[int], meeting: range, height: int) -> None:
    """Moves the lanes' ready times past a round of this height."""
    lanes = slice(meeting.start, meeting.stop)
    ready[lanes] = [max(ready[lanes]) + height] * len(meeting)


class RoundColumns:
    """Makes the column of a round: what it costs each stage of a pipeline, as exact integers.

    A stage takes a round as long as its slowest lane. With 1/3 of the linear part and 1/2 of the
    quadratic one, lanes of (6 linear, 4 quadratic) and (9, 1) take 2 + 2 = 4 and 3 + 0.5 = 3.5: the
    first decides. A message has the rows of the fullest lane. Where experts are split over ranks
    (`synced`), lanes meet before what is token-wise and after it: if all that is linear is
    token-wise, mixers take 2 and 0.5, experts 2 and 3, and the stage 2 + 3 = 5.
    """

    def __init__(
        self, table: CostTable, *, lanes: int, shares: StageCosts, synced: bool = False
    ) -> None:
        self.table, self.lanes, self._shares = table, lanes, shares
        linear = (*shares.forward_linear, *shares.backward_linear)
        quadratic = (*shares.forward_quadratic, *shares.backward_quadratic)
        tokenwise = shares.tokenwise if synced else [0] * len(linear)
        self._parts = list(zip(linear, quadratic, tokenwise, strict=True))
        self._even = linear == quadratic and not synced

    def of(self, rounds: Seq[Round]) -> list[list[int]]:
        """A column for each round: forwards, backwards, messages and a 0."""
        linear, quadratic, tokens, packs = self._lane_sums(rounds)
        if self._even:
            tops = (linear + quadratic + packs).max(axis=1)
            tallest = [int(top) + self.table.round for top in tops]
            heights = {parts: [parts[0] * top for top in tallest] for parts in set(self._parts)}
        else:
            heights = {
                parts: _tallest(linear, quadratic, packs + self.table.round, parts)
                for parts in set(self._parts)
            }
        each = self.table.message * self._shares.whole
        return [
            [
                *(heights[parts][number] for parts in self._parts),
                *(round(streams * each * most) for streams in self._shares.streams[:-1]),
                0,
            ]
            for number, most in enumerate(tokens.max(axis=1).tolist())
        ]

    def heights(self, rounds: Seq[Round], *, pp: int) -> list[int]:
        """What each round takes an average rank, in 1/whole quanta."""
        actions = 2 * self._shares.stages
        return [-(-sum(column[:actions]) // pp) for column in self.of(rounds)]

    def _lane_sums(self, rounds: Seq[Round]) -> tuple[Ints, Ints, Ints, Ints]:
        """Quanta of the linear and the quadratic part, tokens, quanta of packs: [round, lane]."""
        table = self.table
        changes = np.zeros((4, len(rounds), self.lanes + 1), dtype=np.int64)
        numbers, firsts, stops, sums = [], [], [], []
        for number, round_ in enumerate(rounds):
            for pack in round_.packs:
                cost = sum(map(table.costs_at(pack.cp_size).__getitem__, pack.sequences))
                part = 0
                if not self._even:
                    part = sum(map(table.quadratic_at(pack.cp_size).__getitem__, pack.sequences))
                numbers.append(number)
                firsts.append(pack.first_lane)
                stops.append(pack.first_lane + pack.cp_size)
                sums.append((cost - part, part, pack.tokens_per_lane, table.pack))
        if sums:
            for change, value in zip(changes, np.array(sums, dtype=np.int64).T, strict=True):
                np.add.at(change, (numbers, firsts), value)
                np.subtract.at(change, (numbers, stops), value)
        linear, quadratic, tokens, packs = changes.cumsum(axis=2)[:, :, :-1]
        if table.padding:
            added, more_linear, more_quadratic = table.lane_padding(tokens)
            linear, quadratic = linear + more_linear, quadratic + more_quadratic
            tokens = tokens + added
        return linear, quadratic, tokens, packs


def _tallest(linear: Ints, quadratic: Ints, fixed: Ints, parts: tuple[int, int, int]) -> list[int]:
    """How long each round takes with these parts of its linear and quadratic cost.

    fixed: quanta that do not grow with tokens, which go with the linear part. The last of the parts
    is what of the linear cost has a maximum of its own, none where it is 0.
    """
    most = max(parts) * sum(int(cost.max(initial=0)) for cost in (linear, quadratic, fixed))
    if most.bit_length() > 62:
        linear, quadratic, fixed = (cost.astype(object) for cost in (linear, quadratic, fixed))
    first, second, apart = parts
    mixers = (first - apart) * linear + first * fixed + second * quadratic
    tops = mixers.max(axis=1)
    if apart:
        tops = tops + (apart * linear).max(axis=1)
    return [int(top) for top in tops]


@dataclass(frozen=True, slots=True)
class Walk:
    """An order with the times its actions start and end, in units of 1/whole quantum."""

    order: Order
    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    finish: int

    def idle_shares(self) -> tuple[float, ...]:
        """The share of the whole time that each rank waits."""
        times = zip(self.starts, self.ends, strict=True)
        busy = [sum(ends) - sum(starts) for starts, ends in times]
        return tuple(1 - work / self.finish if self.finish else 0.0 for work in busy)

    def events(self) -> Iterator[tuple[int, Action, int, int]]:
        """(rank, action, start, end), rank after rank, in the order they run."""
        times = zip(self.order, self.starts, self.ends, strict=True)
        for rank, (actions, starts, ends) in enumerate(times):
            for action, start, end in zip(actions, starts, ends, strict=True):
                yield rank, action, start, end


Column = Seq[int]
"""A round's forward on each stage, its backward on each stage, stages − 1 messages and a 0."""


def equal_columns(heights: Seq[int], *, stages: int) -> list[Column]:
    """The columns of rounds on stages that are all alike, where messages take no time."""
    return [[height] * stages + [2 * height] * stages + [0] * stages for height in heights]


def walk(order: Order, heights: Seq[int], *, pp: int, vpp: int) -> Walk:
    """`walk_columns` where all stages are alike."""
    return walk_columns(order, equal_columns(heights, stages=pp * vpp), stages=pp * vpp)


def walk_columns(order: Order, columns: Seq[Column], *, stages: int) -> Walk:
    """Runs every action as early as its rank and its dependencies allow.

    A forward waits for the same round's forward on the stage before, a backward for the backward
    on the stage after, each with its message; the last stage's backward for its own forward. A
    message delays the stage that waits for it and keeps no rank busy.
    """
    durations = [column[slot] for slot in range(2 * stages) for column in columns]
    delays = [column[slot] for slot in _message_slots(stages) for column in columns]
    starts, ends = _run(_links(order, rounds=len(columns), stages=stages), durations, delays)
    for rank, (actions, ended) in enumerate(zip(order, ends, strict=True)):
        if len(ended) < len(actions):
            stuck = actions[len(ended)]
            raise ValueError(
                f"the order deadlocks: rank {rank} waits forever before its action {len(ended)}, "
                f"the {stuck.kind} of round {stuck.round} on stage {stuck.stage}"
            )
    finish = max(ended[-1] for ended in ends)
    return Walk(order, tuple(map(tuple, starts)), tuple(map(tuple, ends)), finish)


def _message_slots(stages: int) -> list[int]:
    """Where in a column the message is that each stage's forward, then backward, waits for."""
    none = 3 * stages - 1
    messages = list(range(2 * stages, none))
    return [none, *messages, *messages, none]


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
            slot = action.stage * rounds + action.round
            if action.kind == "forward":
                rank.append((slot - rounds if slot >= rounds else -1, slot))
            else:
                filled = stages * rounds + slot
                rank.append((slot if slot >= turn else filled + rounds, filled))
        links.append(rank)
    return links


def _run(
    links: Links, durations: list[int], delays: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
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
            ready += delays[filled]
            start = ready if ready > now else now
            full[filled] = now = start + durations[filled]
            begun.append(start)
            ended.append(now)
            at += 1
        # Only neighbours wait for a rank, so asking them after each advance reaches everyone.
        if at > first:
            waiting += [r for r in {(rank - 1) % pp, (rank + 1) % pp} if r not in waiting]
    return starts, ends


@dataclass(frozen=True, slots=True, eq=False)
class WaitGraph:
    """Who waits for whom in an order, for walking many orders of rounds at once.

    Actions are numbered level by level; those of a level depend on lower levels only.
    """

    levels: tuple[slice, ...]
    """The actions of each level."""
    before: Ints
    """For each action, the one that its rank runs before it; −1: none."""
    needs: Ints
    """For each action, the one whose result it waits for; −1: none."""
    round: Ints
    """For each action, its round."""
    slot: Ints
    """For each action, where in its round's column its duration is."""
    message: Ints
    """For each action, where in its round's column the message is that it waits for."""


@lru_cache(maxsize=32)
def wait_graph(rounds: int, *, pp: int, vpp: int) -> WaitGraph:
    """The wait graph of `make_order`'s order."""
    stages = pp * vpp
    links = _links(make_order(rounds, pp=pp, vpp=vpp), rounds=rounds, stages=stages)
    # With every action one unit long, an action's start is the number of its level.
    actions = 2 * stages * rounds
    starts, _ = _run(links, [1] * actions, [0] * actions)
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
        slot=(filled // rounds)[by_level],
        message=np.array(_message_slots(stages))[filled // rounds][by_level],
    )


def finish_times(graph: WaitGraph, columns: Ints, orders: Ints) -> Ints:
    """The finish of `walk_columns` for every row of orders: which round's column comes when.

    No time may leave 64 bits: that the columns' sum does not is enough.
    """
    first = np.ascontiguousarray(orders.T)[graph.round] * columns.shape[1]
    flat = columns.ravel()
    durations = flat[first + graph.slot[:, None]]
    # Most profiles have free messages, and then half of the work is saved.
    free = not columns[:, columns.shape[1] // 3 * 2 :].any()
    messages = None if free else flat[first + graph.message[:, None]]
    ends = np.empty((len(graph.round) + 1, len(orders)), dtype=np.int64)
    ends[-1] = 0
    for level in graph.levels:
        out = ends[level]
        ready = ends[graph.needs[level]]
        if messages is not None:
            ready += messages[level]
        np.maximum(ends[graph.before[level]], ready, out=out)
        out += durations[level]
    finish: Ints = ends.max(axis=0)
    return finish


def columns_for(setting: PlanSetting, table: CostTable) -> RoundColumns:
    return RoundColumns(table, lanes=setting.lanes, shares=setting.shares, synced=setting.synced)


def walk_rounds(
    rounds: Seq[Round], setting: PlanSetting, columns: RoundColumns, *, least: int = 0
) -> Walk:
    """Walks the rounds in the schedule's order; no action is shorter than `least`."""
    stages = setting.pp * setting.vpp
    order = make_order(len(rounds), pp=setting.pp, vpp=setting.vpp)
    timed = [
        [max(least, time) for time in column[: 2 * stages]] + column[2 * stages :]
        for column in columns.of(rounds)
    ]
    return walk_columns(order, timed, stages=stages)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step in seconds."""

    busy: tuple[float, ...]
    """Each lane's packs, and `round` for each round it joins (sync `step`: those with work)."""
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
    lanes, whole = setting.lanes, setting.shares.whole
    columns = columns_for(setting, table)
    synced = columns.heights(rounds, pp=setting.pp) if setting.synced else []
    ready, busy = [0] * lanes, [0] * lanes
    rows = lane_costs(rounds, table, lanes)
    for number, (round_, row) in enumerate(zip(rounds, rows, strict=True)):
        met = meetings(round_, lanes, setting.sync)
        for meeting in met:
            height = max(row[meeting.start : meeting.stop]) + table.round
            _meet(ready, meeting, -(-synced[number] // whole) if synced else height)
            for lane in meeting:
                busy[lane] += row[lane] + table.round
        for lane in _without_work(met, row) if table.padding else ():
            ready[lane] += row[lane]
            busy[lane] += row[lane]
    span = max(ready)
    walked = walk_rounds(rounds, setting, columns) if setting.pp > 1 else None
    finish = walked.finish if walked else sum(synced) or span * whole
    bubbles = walked.idle_shares() if walked else ()
    padded = total_lane_tokens(rounds, lanes=lanes, padding=setting.padding)
    return SimulatedStep(
        busy=tuple(table.seconds(quanta) for quanta in busy),
        span=table.seconds(span),
        predicted=finish / whole / table.scale,
        imbalance=1 - sum(busy) / (lanes * span) if span else 0.0,
        bubble=sum(bubbles) / len(bubbles) if bubbles else 0.0,
        rank_bubbles=bubbles,
        padding=1 - sum(lengths) / padded if padded else 0.0,
        walk=walked,
        unit=1 / whole / table.scale,
    )


def pipeline_walk(plan: Plan) -> Walk:
    """When the actions of a plan's pipeline run, by which ranks order their messages.

    Every action takes some time here, also where it costs nothing, as in an empty round.
    """
    columns = columns_for(plan.setting, plan_table(plan))
    return walk_rounds(plan.rounds, plan.setting, columns, least=1)


@dataclass(frozen=True, slots=True)
class Message:
    """What an action hands to the next stage (forward) or to the one before (backward)."""

    action: Action
    """The action that made it: a forward's rows, or the gradient of a backward's input."""
    source: int
    """The pipeline rank that sends it."""
    target: int
    """The pipeline rank that receives it."""

    @property
    def needed_by(self) -> Action:
        step = 1 if self.action.kind == "forward" else -1
        return Action(self.action.kind, self.action.stage + step, self.action.round)


Batch = tuple[Message, ...]
"""Messages that a rank sends and receives together."""


Queue = tuple[Action | Batch, ...]


def rank_queues(walk: Walk, *, pp: int, stages: int) -> tuple[Queue, ...]:
    """What each pipeline rank does, one after another; inside a rank there are no messages.

    A message is sent at the time its action ends, by both sides: the receiver takes it in then, and
    keeps it until its own action begins. So every entry of every queue has a place on one time
    line, and a rank's queue follows it. That is why nothing can deadlock, not even where a send
    blocks until it is received: of all entries not done, the earliest has everything before it done
    on all the ranks that take part. Messages of one rank at one time make a batch, in a fixed
    order. Two ranks, one stage each, two rounds; a forward takes 1 and a backward 2 units:

        rank 0:  F0  send F0  F1  send F1  recv B0  B0  recv B1  B1
        rank 1:  recv F0  F0  recv F1  B0  send B0  F1  B1  send B1
    """
    entries: list[dict[tuple[int, int], list[Message] | Action]] = [{} for _ in range(pp)]
    for rank, action, start, end in walk.events():
        # Or its message would come before it.
        assert start < end, f"{action} takes no time"
        entries[rank][start, 1] = action
        if (message := message_of(action, pp=pp, stages=stages)) is None:
            continue
        for side in (message.source, message.target):
            batch = entries[side].setdefault((end, 0), [])
            assert isinstance(batch, list)
            batch.append(message)

    def in_order(entry: list[Message] | Action) -> Action | Batch:
        """A batch in an order that both sides of every pair share."""
        if isinstance(entry, Action):
            return entry
        return tuple(sorted(entry, key=lambda m: (m.action.kind, m.action.stage, m.action.round)))

    return tuple(tuple(in_order(each[time]) for time in sorted(each)) for each in entries)


def message_of(action: Action, *, pp: int, stages: int) -> Message | None:
    """What an action sends; None from the last forward, the first backward and inside a rank."""
    following = action.stage + (1 if action.kind == "forward" else -1)
    if not 0 <= following < stages or following % pp == action.stage % pp:
        return None
    return Message(action, action.stage % pp, following % pp)


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each lane works and waits, all in seconds: for drawing, and for records of a run."""

    start: Floats
    """[round, lane]: when a lane starts its work."""
    cost: Floats
    """[round, lane]: how long it works."""
    end: Floats
    """[round, lane]: until when it works or waits."""
    pack_cost: list[float]
    """For each pack, in the order of `plan.packs()`, what it costs each of its lanes."""
    pack_start: list[Floats]
    """For each pack, when each of its lanes begins it."""
    total: float
    """The latest end."""

    @property
    def idle(self) -> float:
        """The share of all lanes' time that is spent waiting."""
        return 1.0 - float(self.cost.sum(axis=0).mean()) / self.total


def make_timeline(plan: Plan) -> Timeline:
    """Walks a plan in its sync mode: the lanes of one pipeline rank, rounds back to back.

    Two lanes, sync mode `round`, cost = tokens: round 0 holds a pack of 4 tokens on lane 0 and one
    of 1 on lane 1, round 1 one of 3 on each. Starts are [[0, 0], [4, 4]], costs [[4, 1], [3, 3]],
    ends [[4, 4], [7, 7]], and lane 1 idles 3 of 7 seconds.
    """
    pack_cost = _pack_seconds(plan)
    cost = _lane_seconds(plan, pack_cost)
    start, end = _round_times(plan, cost)
    # A lane runs its packs one by one, as listed.
    cursor = start + plan.setting.profile.round
    pack_start = []
    for (number, pack), seconds in zip(plan.packs(), pack_cost, strict=True):
        lanes = cursor[number, pack.first_lane : pack.first_lane + pack.cp_size]
        pack_start.append(lanes.copy())
        lanes += seconds
    return Timeline(start, cost, end, pack_cost, pack_start, total=float(end[-1].max()))


def _pack_seconds(plan: Plan) -> list[float]:
    """Seconds that each pack costs each of its lanes."""
    profile = plan.setting.profile
    lengths = run_lengths(plan.setting, [sequence.length for sequence in plan.sequences]).tolist()

    def cost(length: int, cp_size: int) -> float:
        return profile.sequence_cost(length, padded_length(length, cp_size), cp_size)

    return [
        profile.pack + sum(cost(lengths[i], pack.cp_size) for i in pack.sequences)
        for _, pack in plan.packs()
    ]


def _lane_seconds(plan: Plan, pack_cost: Seq[float]) -> Floats:
    """Seconds of work [round, lane]: its packs, its padding and the round's own cost.

    In sync mode `step` a lane without packs skips the round and does not pay for it.
    """
    setting, profile = plan.setting, plan.setting.profile
    costs = np.zeros((len(plan.rounds), setting.lanes))
    tokens = np.zeros(costs.shape, dtype=np.int64)
    for (number, pack), seconds in zip(plan.packs(), pack_cost, strict=True):
        lanes = slice(pack.first_lane, pack.first_lane + pack.cp_size)
        costs[number, lanes] += seconds
        tokens[number, lanes] += pack.tokens_per_lane
    joins = costs > 0 if setting.sync == "step" else np.ones_like(costs)
    added = setting.padding.totals(tokens) - tokens
    padding = profile.linear * added + profile.quadratic * profile.squares(added)
    return costs + padding + profile.round * joins


def _round_times(plan: Plan, cost: Floats) -> tuple[Floats, Floats]:
    """Starts and ends [round, lane]: lanes that wait for each other start and end together.

    Where experts are split over ranks, lanes wait inside the layers too, so a round takes longer
    than its slowest lane works.
    """
    start, end = np.zeros_like(cost), np.zeros_like(cost)
    if plan.setting.synced:
        seconds = np.array(round_seconds(plan))[:, None]
        ends = seconds.cumsum(axis=0)
        return start + ends - seconds, end + ends
    lanes = cost.shape[1]
    ready = np.zeros(lanes)
    for number, round_ in enumerate(plan.rounds):
        is_first = np.ones(lanes, dtype=np.bool_)
        for meeting in meetings(round_, lanes, plan.setting.sync):
            is_first[meeting.start + 1 : meeting.stop] = False
        first = np.flatnonzero(is_first)
        sizes = np.diff(first, append=lanes)
        start[number] = np.repeat(np.maximum.reduceat(ready, first), sizes)
        ready = start[number] + np.repeat(np.maximum.reduceat(cost[number], first), sizes)
        end[number] = ready
    return start, end


def round_seconds(plan: Plan) -> list[float]:
    """What each round takes an average pipeline rank where lanes meet inside the layers."""
    setting, table = plan.setting, plan_table(plan)
    heights = columns_for(setting, table).heights(plan.rounds, pp=setting.pp)
    return [height / setting.shares.whole / table.scale for height in heights]
