"""When each action of a pipeline runs.

In: an order of work and for each round a column: how long its forward takes on each stage, its
backward on each stage, and its message from each stage to the next (and the gradient's way back).
Out: the start and end of every action, or the finish for many orders of the rounds at once.

Where all stages are alike, a round keeps every rank busy for its height, the cost of its slowest
lane plus `round`: a third of it in forwards, two thirds in backwards, evenly over the rank's
stages. In units of 1/(3·vpp) quantum a stage's forward then takes `height` and its backward
2·height. Two rounds of height 6 on two ranks of one stage finish after (2 + 1)·6 = 18 quanta, which
are 54 units.

A message delays the stage that waits for it and keeps no rank busy.

What each pipeline rank does, one after another: its actions, and the messages between them.

In: an order of work and the times at which its actions would run. Out: for each rank one queue of
actions and batches of messages; the executor issues them in this order, and so do traces.

A message is sent at the time its action ends, by both sides: the receiver takes it in then, and
keeps it until its own action begins. So every entry of every queue has a place on one time line,
and a rank's queue follows it. That is why nothing can deadlock, not even where a send blocks until
it is received: of all entries not done, the earliest has everything before it done on all the ranks
that take part. Messages of one rank at one time make a batch, in a fixed order.

Two ranks, one stage each, two rounds; a forward takes 1 and a backward 2 units:

    rank 0:  F0  send F0  F1  send F1  recv B0  B0  recv B1  B1
    rank 1:  recv F0  F0  recv F1  B0  send B0  F1  B1  send B1

What a round costs each stage of a pipeline: its column for plan/pipeline_times.py.

In: rounds, a cost table and how stages share a round's cost. Out: for each round the durations of
its forward and backward on every stage, and of its messages, as exact integers.

A stage takes a round as long as its slowest lane. With 1/3 of the linear part and 1/2 of the
quadratic one, lanes of (6 linear, 4 quadratic) and (9, 1) take 2 + 2 = 4 and 3 + 0.5 = 3.5: the
first decides. A message has the rows of the fullest lane.

Where experts are split over ranks (`synced`), lanes meet before and after them. If all that is
linear is token-wise, mixers take 2 and 0.5, experts 2 and 3, and the stage 2 + 3 = 5.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from longshore.plan.cost import CostTable, Ints, StageCosts
from longshore.plan.layout import Action, Kind, Order, make_order
from longshore.plan.types import Round


@dataclass(frozen=True, slots=True)
class Event:
    """One action of a pipeline rank, in units of 1/whole quantum, see StageCosts."""

    rank: int
    """Pipeline rank."""
    stage: int
    """Counted over the whole pipeline."""
    round: int
    """Which round it works on."""
    kind: Kind
    """Forward or backward."""
    start: int
    """When it starts."""
    end: int
    """When it ends."""


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

    def events(self) -> Iterator[Event]:
        """Every action with its times, rank after rank, in the order they run."""
        times = zip(self.order, self.starts, self.ends, strict=True)
        for rank, (actions, starts, ends) in enumerate(times):
            for action, start, end in zip(actions, starts, ends, strict=True):
                yield Event(rank, action.stage, action.round, action.kind, start, end)


Column = Seq[int]
"""Of one round: stages forwards, stages backwards, stages − 1 messages and a 0."""


def equal_columns(heights: Seq[int], *, stages: int) -> list[Column]:
    """The columns of rounds on stages that are all alike, where messages take no time."""
    return [[height] * stages + [2 * height] * stages + [0] * stages for height in heights]


def walk(order: Order, heights: Seq[int], *, pp: int, vpp: int) -> Walk:
    """`walk_columns` where all stages are alike."""
    return walk_columns(order, equal_columns(heights, stages=pp * vpp), stages=pp * vpp)


def walk_columns(order: Order, columns: Seq[Column], *, stages: int) -> Walk:
    """Runs every action as early as its rank and its dependencies allow.

    A forward waits for the same round's forward on the stage before, a backward for the backward
    on the stage after, each with its message; the last stage's backward for its own forward.
    """
    durations = [column[slot] for slot in range(2 * stages) for column in columns]
    slots = _message_slots(stages)
    delays = [column[slot] for slot in slots for column in columns]
    starts, ends = _run(_links(order, rounds=len(columns), stages=stages), durations, delays)
    _refuse_deadlock(order, ends)
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
            place = action.stage * rounds + action.round
            if action.kind == "forward":
                rank.append((place - rounds if place >= rounds else -1, place))
            else:
                filled = stages * rounds + place
                rank.append((place if place >= turn else filled + rounds, filled))
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


def _refuse_deadlock(order: Order, ends: list[list[int]]) -> None:
    for rank, (actions, ended) in enumerate(zip(order, ends, strict=True)):
        if len(ended) < len(actions):
            stuck = actions[len(ended)]
            raise ValueError(
                f"the order deadlocks: rank {rank} waits forever before its action {len(ended)}, "
                f"the {stuck.kind} of round {stuck.round} on stage {stuck.stage}"
            )


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
    """The queue of every pipeline rank. A message inside a rank, as with pp 1, is none.

    Every action of the walk takes some time, or its message would come before it.
    """
    entries: list[dict[tuple[int, int], list[Message] | Action]] = [{} for _ in range(pp)]
    for rank, (actions, ends) in enumerate(zip(walk.order, walk.ends, strict=True)):
        for number, (action, end) in enumerate(zip(actions, ends, strict=True)):
            start = walk.starts[rank][number]
            assert start < end, f"{action} takes no time"
            entries[rank][start, 1] = action
            message = message_of(action, pp=pp, stages=stages)
            if message is not None:
                for side in (message.source, message.target):
                    batch = entries[side].setdefault((end, 0), [])
                    assert isinstance(batch, list)
                    batch.append(message)
    return tuple(_sorted(each) for each in entries)


def message_of(action: Action, *, pp: int, stages: int) -> Message | None:
    """What an action sends; None from the last forward, the first backward and inside a rank."""
    following = action.stage + (1 if action.kind == "forward" else -1)
    if not 0 <= following < stages or following % pp == action.stage % pp:
        return None
    return Message(action, action.stage % pp, following % pp)


def _sorted(entries: dict[tuple[int, int], list[Message] | Action]) -> Queue:
    in_order = (entries[time] for time in sorted(entries))
    return tuple(each if isinstance(each, Action) else _batch(each) for each in in_order)


def _batch(messages: Seq[Message]) -> Batch:
    """In an order that both sides of every pair share."""
    return tuple(sorted(messages, key=lambda m: (m.action.kind, m.action.stage, m.action.round)))


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
