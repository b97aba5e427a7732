"""What a plan costs by the formulas of the issue, in floating point, apart from the planner.

In: a Plan. Out: seconds. A pack of CP size k costs each of its lanes

    pack + Σ (linear·padded + quadratic·length²)/k + gather[k > node]·Σ padded·(k−1)/k

Two sequences of 8 and 3 tokens, the first over both of two lanes, the second on lane 1, cost 7 at
one second a token. A lane's tokens are rounded up to `align`, then to a bucket, and what that adds
is a sequence more: with buckets of 10 lane 1 pads 3 tokens, and both cost 10.
"""

import math

from longshore.plan import CostProfile, Pack, Plan, Round
from longshore.plan.layout import Action, make_order


def padded(length: int, cp_size: int) -> int:
    chunk = 1 if cp_size == 1 else 2 * cp_size
    return length + -length % chunk


def sequence_cost(profile: CostProfile, length: int, cp_size: int) -> float:
    """Seconds that a sequence adds to each lane of its group."""
    tokens = padded(length, cp_size)
    cost = (profile.linear * tokens + profile.quadratic * length * length) / cp_size
    if cp_size == 1:
        return cost
    rate = profile.gather[1] if cp_size > profile.node else profile.gather[0]
    return cost + rate * tokens * (cp_size - 1) / cp_size


def charged_lengths(plan: Plan) -> list[int]:
    """The lengths that cost time: policy `padded` runs every sequence as the longest."""
    lengths = [sequence.length for sequence in plan.sequences]
    return [max(lengths)] * len(lengths) if plan.setting.policy == "padded" else lengths


def lane_costs(plan: Plan, round_: Round) -> list[float]:
    profile, lengths = plan.setting.profile, charged_lengths(plan)
    row = [0.0] * plan.setting.lanes
    for pack in round_.packs:
        costs = [sequence_cost(profile, lengths[i], pack.cp_size) for i in pack.sequences]
        for lane in lanes_of(pack):
            row[lane] += profile.pack + math.fsum(costs)
    return [
        cost + sequence_cost(profile, total - tokens, 1)
        for cost, (tokens, total) in zip(row, lane_tokens(plan, round_), strict=True)
    ]


def lane_tokens(plan: Plan, round_: Round) -> list[tuple[int, int]]:
    """Of each lane the tokens of its packs, and those that it runs with all its padding.

    A lane without packs runs 16 tokens, which count as none where nothing is rounded up.
    """
    setting, lengths = plan.setting, charged_lengths(plan)
    pairs = []
    for lane in range(setting.lanes):
        packs = [pack for pack in round_.packs if lane in lanes_of(pack)]
        tokens = sum(padded(lengths[i], p.cp_size) // p.cp_size for p in packs for i in p.sequences)
        total = tokens
        if setting.align > 1 or setting.buckets:
            total = tokens or min(16, setting.capacity // setting.align * setting.align)
            total += -total % setting.align
            total = min((size for size in setting.buckets if size >= total), default=total)
        pairs.append((tokens, total))
    return pairs


def lanes_of(pack: Pack) -> range:
    return range(pack.first_lane, pack.first_lane + pack.cp_size)


def step_seconds(plan: Plan) -> float:
    setting = plan.setting
    if setting.sync == "step":
        return _free_running(plan)
    heights = [max(lane_costs(plan, round_)) + setting.profile.round for round_ in plan.rounds]
    if setting.pp == 1:
        return math.fsum(heights)
    return _pipelined(heights, pp=setting.pp, vpp=setting.vpp)


def _free_running(plan: Plan) -> float:
    """Lanes wait for those that share a pack with them, directly or through others."""
    ready = [0.0] * plan.setting.lanes
    for round_ in plan.rounds:
        row = lane_costs(plan, round_)
        for joined in _joined_lanes(round_):
            end = max(ready[i] for i in joined) + max(row[i] for i in joined)
            for lane in joined:
                ready[lane] = end + plan.setting.profile.round
        for lane in set(range(len(row))) - set().union(*_joined_lanes(round_)):
            ready[lane] += row[lane]
    return max(ready)


def _joined_lanes(round_: Round) -> list[set[int]]:
    sets: list[set[int]] = []
    for pack in round_.packs:
        lanes = set(lanes_of(pack))
        touched = [other for other in sets if other & lanes]
        sets = [other for other in sets if not other & lanes] + [lanes.union(*touched)]
    return sets


def _pipelined(heights: list[float], *, pp: int, vpp: int) -> float:
    """A third of a round's height is forwards, two thirds are backwards, even over the stages."""
    queues = [list(actions) for actions in make_order(len(heights), pp=pp, vpp=vpp)]
    now, ends = [0.0] * pp, {}
    while any(queues):
        for rank, queue in enumerate(queues):
            needed = _needs(queue[0], pp * vpp) if queue else None
            if not queue or (needed and needed not in ends):
                continue
            action = queue.pop(0)
            length = heights[action.round] / vpp / 3 * (1 if action.kind == "forward" else 2)
            now[rank] = max(now[rank], ends.get(needed, 0.0)) + length
            ends[action] = now[rank]
    return max(now)


def _needs(action: Action, stages: int) -> Action | None:
    """The action whose result this one waits for."""
    if action.kind == "forward":
        return Action("forward", action.stage - 1, action.round) if action.stage else None
    if action.stage == stages - 1:
        return Action("forward", action.stage, action.round)
    return Action("backward", action.stage + 1, action.round)
