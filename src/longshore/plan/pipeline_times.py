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
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from longshore.plan.cost import Ints
from longshore.plan.order import Kind, Order, make_order


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
