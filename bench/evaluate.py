"""An evaluator of plans that shares no code with longshore and believes nothing a plan says.

In: a step of a plan in its JSON form, the lengths and the setting. Out: what is wrong with the
plan, and the step's time by the cost formula; apart from that, a time that no plan can beat.

A pack of CP size k costs each of its lanes

    pack + Σ (linear·padded + quadratic·length²)/k + gather[k > node]·Σ padded·(k−1)/k

(no gather and no padding at k = 1, else padding to a multiple of 2·k), a round adds `round`. What
a lane runs besides, up to a multiple of `align` and then a bucket, is one more sequence at k = 1,
also on a lane without packs. In sync mode `round` a step costs the sum of the rounds' largest lane
costs. In `step`, lanes joined through packs of a round start at their latest ready time and end
together after their largest cost; the step costs the latest end. Two lanes, sequences of 8 and 3
tokens, one second a token:

    {"rounds": [{"packs": [{"first_lane": 0, "cp_size": 2, "sequences": [0]},
                           {"first_lane": 1, "cp_size": 1, "sequences": [1]}]}]}

costs 7: lane 0 holds 4 tokens and lane 1 holds 4 + 3.

With experts lanes wait for each other inside each layer, between the mixer and the experts, so a
round takes the largest mixer part of a lane and the largest token-wise part of a lane. In a
pipeline each rank has an equal stage and a backward takes twice its forward.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_FAULTS = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """What the plan was asked for; `profile` is the JSON form of a cost profile."""

    lengths: list[int]
    lanes: int
    capacity: int
    profile: dict[str, Any]
    sync: str
    align: int = 1
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """Seconds of the step, its rounds, the share of real arithmetic in the lanes' time, and faults.

    `over_capacity` counts the lanes of rounds that hold more tokens than the capacity.
    """

    predicted: float
    rounds: int
    efficiency: float
    over_capacity: int
    faults: tuple[str, ...]


def legal_sizes(lanes: int) -> list[int]:
    """The powers of two up to the lanes, and the whole of the lanes."""
    return sorted({2**power for power in range(lanes.bit_length())} | {lanes})


def padded(length: int, cp_size: int) -> int:
    return length if cp_size == 1 else -(-length // (2 * cp_size)) * 2 * cp_size


def pack_cost(sequences: list[int], cp_size: int, setting: Setting) -> float:
    """Seconds that a pack costs each of its lanes."""
    profile = setting.profile
    tokens = sum(padded(setting.lengths[i], cp_size) for i in sequences)
    squares = sum(setting.lengths[i] ** 2 for i in sequences)
    cost = profile["pack"] + (profile["linear"] * tokens + profile["quadratic"] * squares) / cp_size
    if cp_size == 1:
        return float(cost)
    gather = profile["gather"][1 if cp_size > profile["node"] else 0]
    return float(cost + gather * tokens * (cp_size - 1) / cp_size)


def score(step: dict[str, Any], setting: Setting) -> Score:
    """Checks a step of a plan and says what it costs. Faults other than capacity cost no time."""
    faults = _sequence_faults(step, len(setting.lengths))
    over = 0
    for number, round_ in enumerate(step["rounds"]):
        faults += [f"round {number}: {fault}" for fault in _round_faults(round_, setting)]
        if not faults:
            over += int((_lane_tokens(round_, setting) > setting.capacity).sum())
    if faults:
        return Score(float("nan"), len(step["rounds"]), float("nan"), 0, _first(faults))
    if over:
        faults.append(f"{over} lanes of rounds hold more than {setting.capacity} tokens")
    predicted = step_time(step, setting)
    ideal = sum(
        setting.profile["linear"] * n + setting.profile["quadratic"] * n * n
        for n in setting.lengths
    )
    efficiency = ideal / setting.lanes / predicted
    return Score(predicted, len(step["rounds"]), efficiency, over, tuple(faults))


def _first(faults: list[str]) -> tuple[str, ...]:
    more = len(faults) - MOST_FAULTS
    return (*faults[:MOST_FAULTS], f"and {more} more") if more > 0 else tuple(faults)


def _sequence_faults(step: dict[str, Any], count: int) -> list[str]:
    """Each sequence of the step must be in just one pack, and no other may be."""
    packs = [pack for round_ in step["rounds"] for pack in round_["packs"]]
    seen = Counter(i for pack in packs for i in pack["sequences"])
    missing = [f"sequence {i} is in no pack" for i in range(count) if i not in seen]
    foreign = [f"sequence {i} does not exist" for i in seen if i not in range(count)]
    return missing + foreign + [f"sequence {i} is in {n} packs" for i, n in seen.items() if n > 1]


def _round_faults(round_: dict[str, Any], setting: Setting) -> list[str]:
    """Groups must be legal, aligned, inside the lanes, once a round, and fall in size on a lane."""
    faults = []
    legal = legal_sizes(setting.lanes)
    groups: set[tuple[int, int]] = set()
    smallest = np.full(setting.lanes, setting.lanes, dtype=np.int64)
    for pack in round_["packs"]:
        first, size = pack["first_lane"], pack["cp_size"]
        if size not in legal or first % size or not 0 <= first <= setting.lanes - size:
            faults.append(f"no group of {size} lanes may start at lane {first}")
            continue
        if (first, size) in groups:
            faults.append(f"two packs on the group of {size} lanes from lane {first}")
        if not pack["sequences"]:
            faults.append(f"an empty pack on lane {first}")
        if (smallest[first : first + size] < size).any():
            faults.append(f"the pack of {size} lanes from lane {first} follows a smaller one")
        groups.add((first, size))
        smallest[first : first + size] = size
        faults += _token_faults(pack, setting)
    return faults


def _token_faults(pack: dict[str, Any], setting: Setting) -> list[str]:
    """`tokens_per_lane`, where a pack has it, must be the truth."""
    said, sequences = pack.get("tokens_per_lane"), pack["sequences"]
    if said is None or not all(0 <= i < len(setting.lengths) for i in sequences):
        return []
    held = _pack_tokens(pack, setting)
    where = f"lane {pack['first_lane']}"
    return [] if held == said else [f"a pack on {where} says {said} tokens and holds {held}"]


def _pack_tokens(pack: dict[str, Any], setting: Setting) -> int:
    size: int = pack["cp_size"]
    return sum(padded(setting.lengths[i], size) for i in pack["sequences"]) // size


def _lane_tokens(round_: dict[str, Any], setting: Setting) -> NDArray[np.int64]:
    tokens = np.zeros(setting.lanes, dtype=np.int64)
    for pack in round_["packs"]:
        first, size = pack["first_lane"], pack["cp_size"]
        tokens[first : first + size] += _pack_tokens(pack, setting)
    return tokens


def _padding(round_: dict[str, Any], setting: Setting) -> NDArray[np.int64]:
    """Tokens that each lane runs besides those of its packs."""
    held = _lane_tokens(round_, setting)
    if setting.align == 1 and not setting.buckets:
        return np.zeros_like(held)

    def total(tokens: int) -> int:
        tokens = tokens or min(16, setting.capacity // setting.align * setting.align)
        tokens = -(-tokens // setting.align) * setting.align
        return min((size for size in setting.buckets if size >= tokens), default=tokens)

    return np.array([total(tokens) for tokens in held.tolist()]) - held


def step_time(step: dict[str, Any], setting: Setting) -> float:
    """Seconds of a step whose groups are legal, in the setting's sync mode."""
    if setting.sync not in ("round", "step"):
        raise ValueError(f"sync is {setting.sync!r}; it may be 'round' or 'step'")
    ready = np.zeros(setting.lanes)
    for round_ in step["rounds"]:
        cost = np.zeros(setting.lanes)
        links = np.zeros(setting.lanes, dtype=np.int64)
        for pack in round_["packs"]:
            first, size = pack["first_lane"], pack["cp_size"]
            cost[first : first + size] += pack_cost(pack["sequences"], size, setting)
            links[first] += 1
            links[first + size - 1] -= 1
        added = _padding(round_, setting)
        cost += setting.profile["linear"] * added + setting.profile["quadratic"] * added**2
        cost += setting.profile["round"]
        ready = _ends(ready, cost, np.cumsum(links) > 0, setting.sync)
    return float(ready.max())


def _ends(ready: Floats, cost: Floats, linked: NDArray[np.bool_], sync: str) -> Floats:
    """When each lane ends a round; `linked[i]`: lanes i and i + 1 are joined through a pack."""
    if sync == "round":
        return np.full_like(ready, ready.max() + cost.max())
    starts = np.flatnonzero(np.concatenate([[True], ~linked[:-1]]))
    ends = np.maximum.reduceat(ready, starts) + np.maximum.reduceat(cost, starts)
    return np.repeat(ends, np.diff(np.append(starts, len(ready))))


def round_heights(
    step: dict[str, Any], setting: Setting, *, mixer_share: float = 1.0
) -> list[float]:
    """Seconds of each round for lanes that wait for each other.

    mixer_share: the part of a token's linear cost that the mixer has. 1 is without experts: then
    nothing is token-wise, and a round takes as long as its slowest lane. A pack's own cost, squares
    and what is gathered are the mixer's.
    """
    heights = []
    linear, quadratic = setting.profile["linear"], setting.profile["quadratic"]
    for round_ in step["rounds"]:
        added = _padding(round_, setting)
        mixer = mixer_share * linear * added + quadratic * added**2
        token_wise = (1 - mixer_share) * linear * added
        for pack in round_["packs"]:
            lanes = slice(pack["first_lane"], pack["first_lane"] + pack["cp_size"])
            tokens = _pack_tokens(pack, setting)
            apart = (1 - mixer_share) * linear * tokens
            mixer[lanes] += pack_cost(pack["sequences"], pack["cp_size"], setting) - apart
            token_wise[lanes] += apart
        heights.append(float(mixer.max() + token_wise.max() + setting.profile["round"]))
    return heights


def pipeline_time(heights: list[float], pp: int) -> float:
    """Seconds of rounds of these heights in a pipeline of pp equal stages, one forward and one
    backward in turn: 9, 3 and 3 take 24 on two ranks, and 15 on one."""
    rounds = len(heights)
    work = []
    for rank in range(pp):
        ahead = min(pp - rank - 1, rounds)
        turns = [w for r in range(rounds - ahead) for w in (("F", ahead + r), ("B", r))]
        drain = [("B", r) for r in range(rounds - ahead, rounds)]
        work.append([*(("F", r) for r in range(ahead)), *turns, *drain])
    ended: dict[tuple[str, int, int], float] = {}
    ready, place = [0.0] * pp, [0] * pp
    while len(ended) < 2 * rounds * pp:
        for rank in range(pp):
            while place[rank] < len(work[rank]):
                kind, number = work[rank][place[rank]]
                before = rank - 1 if kind == "F" else rank + 1
                if 0 <= before < pp and (kind, number, before) not in ended:
                    break
                start = max(ready[rank], ended.get((kind, number, before), 0.0))
                ready[rank] = start + heights[number] * (1 if kind == "F" else 2) / 3
                ended[kind, number, rank] = ready[rank]
                place[rank] += 1
    return max(ready)


def lower_bound(setting: Setting) -> float:
    """The smallest T for which every sequence has a CP size that fits and costs at most T alone,
    and the cheapest such choices together fit into lanes·T. No plan ends before it."""
    alone, area = _choices(setting)
    order = np.argsort(alone, axis=1, kind="stable")
    alone = np.take_along_axis(alone, order, axis=1)
    best = np.minimum.accumulate(np.take_along_axis(area, order, axis=1), axis=1)
    floor = float(alone[:, 0].max())
    if not np.isfinite(floor):
        raise ValueError("a sequence is longer than all lanes can hold")
    drop = np.diff(best, axis=1).ravel()
    when = np.maximum(alone[:, 1:].ravel(), floor)
    keep = (drop < 0) & np.isfinite(when)
    when, drop = when[keep], drop[keep]
    by_time = np.argsort(when, kind="stable")
    times = np.concatenate([[floor], when[by_time]])
    total = np.concatenate([[0.0], np.cumsum(drop[by_time])]) + best[:, 0].sum()
    needed = np.maximum(times, total / setting.lanes)
    return float(needed[needed <= np.append(times[1:], np.inf)][0])


def experts_bound(setting: Setting, *, mixer_share: float) -> float:
    """A time that no plan ends before where mixers and experts have their own slowest lanes.

    The rounds' largest mixer parts add up to no less than a lower bound of the mixers alone, and
    the largest token-wise parts to no less than the mean lane's.
    """
    linear: float = setting.profile["linear"]
    mixers = replace(setting, profile={**setting.profile, "linear": mixer_share * linear})
    token_wise = (1 - mixer_share) * linear * sum(setting.lengths) / setting.lanes
    return max(lower_bound(setting), lower_bound(mixers) + token_wise)


def _choices(setting: Setting) -> tuple[Floats, Floats]:
    """For each sequence and legal CP size: its cost alone, infinite where it does not fit, and its
    area, which is the cost without the pack's, times the lanes."""
    profile, n = setting.profile, np.array(setting.lengths, dtype=np.float64)
    alone, area = [], []
    for size in legal_sizes(setting.lanes):
        held = n if size == 1 else np.ceil(n / (2 * size)) * 2 * size
        gather = profile["gather"][1 if size > profile["node"] else 0] * (size - 1)
        work = (profile["linear"] + gather) * held + profile["quadratic"] * n * n
        fits = held / size <= setting.capacity
        alone.append(np.where(fits, work / size + profile["pack"] + profile["round"], np.inf))
        area.append(np.where(fits, work, np.inf))
    return np.stack(alone, axis=1), np.stack(area, axis=1)
