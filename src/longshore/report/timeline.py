"""When each lane works and when it waits, for drawing.

In: a Plan. Out: seconds for each pack, and arrays [round, lane] of starts, costs and ends.

Two lanes, sync mode `round`, cost = tokens: round 0 holds a pack of 4 tokens on lane 0 and one of 1
on lane 1, round 1 one of 3 on each. Starts are [[0, 0], [4, 4]], costs [[4, 1], [3, 3]], ends
[[4, 4], [7, 7]], and lane 1 idles 3 of 7 seconds. In sync mode `step` lane 1 starts round 1 at 1
and ends at 4.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longshore.plan.shapes import padded_length
from longshore.plan.simulate import round_seconds
from longshore.plan.types import Pack, Plan, Round

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A plan in time, all in seconds."""

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
    """Walks a plan in its sync mode: the lanes of one pipeline rank, rounds back to back."""
    pack_cost = pack_costs(plan)
    cost = lane_costs(plan, pack_cost)
    start, end = round_times(plan, cost)
    return Timeline(
        start=start,
        cost=cost,
        end=end,
        pack_cost=pack_cost,
        pack_start=pack_starts(plan, pack_cost, start),
        total=float(end[-1].max()),
    )


def pack_costs(plan: Plan) -> list[float]:
    """Seconds that each pack costs each of its lanes.

    Policy `padded` runs every sequence at the length of the longest.
    """
    profile = plan.setting.profile
    lengths = [sequence.length for sequence in plan.sequences]
    if plan.setting.planned_by.pads_to_longest:
        lengths = [max(lengths)] * len(lengths)

    def cost(pack: Pack) -> float:
        k = pack.cp_size
        return profile.pack + sum(
            profile.sequence_cost(lengths[i], padded_length(lengths[i], k), k)
            for i in pack.sequences
        )

    return [cost(pack) for _, pack in plan.packs()]


def lane_costs(plan: Plan, pack_cost: Seq[float]) -> Floats:
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


def round_times(plan: Plan, cost: Floats) -> tuple[Floats, Floats]:
    """Starts and ends [round, lane]: lanes that wait for each other start and end together.

    Where experts are split over ranks, lanes wait inside the layers too, so a round takes longer
    than its slowest lane works.
    """
    start, end = np.zeros_like(cost), np.zeros_like(cost)
    ready = np.zeros(cost.shape[1])
    if plan.setting.synced:
        seconds = np.array(round_seconds(plan))[:, None]
        ends = seconds.cumsum(axis=0)
        return start + ends - seconds, end + ends
    for number, round_ in enumerate(plan.rounds):
        first = waiting_groups(round_, lanes=cost.shape[1], sync=plan.setting.sync)
        sizes = np.diff(first, append=cost.shape[1])
        start[number] = np.repeat(np.maximum.reduceat(ready, first), sizes)
        ready = start[number] + np.repeat(np.maximum.reduceat(cost[number], first), sizes)
        end[number] = ready
    return start, end


def waiting_groups(round_: Round, *, lanes: int, sync: str) -> Ints:
    """The first lane of each group of lanes that wait for each other in this round.

    Sync `round`: all of them, so [0]. Sync `step`: lanes joined through shared packs; with 4 lanes
    and one pack on lanes 0 and 1 that is [0, 2, 3]. A pack's lanes are neighbours, so the
    lanes of a group are too.
    """
    if sync == "round":
        return np.zeros(1, dtype=np.int64)
    joints = np.zeros(lanes + 1, dtype=np.int64)
    for pack in round_.packs:
        joints[pack.first_lane + 1] += 1
        joints[pack.first_lane + pack.cp_size] -= 1
    return np.flatnonzero(np.cumsum(joints)[:lanes] == 0)


def pack_starts(plan: Plan, pack_cost: Seq[float], start: Floats) -> list[Floats]:
    """When each lane of each pack begins it: a lane runs its packs one by one, as listed."""
    cursor = start + plan.setting.profile.round
    starts: list[Floats] = []
    for (number, pack), seconds in zip(plan.packs(), pack_cost, strict=True):
        lanes = cursor[number, pack.first_lane : pack.first_lane + pack.cp_size]
        starts.append(lanes.copy())
        lanes += seconds
    return starts
