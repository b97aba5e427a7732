"""Plans made by hand, so that the page is tested without the planner."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from longshore.plan.cost import CostProfile
from longshore.plan.shapes import legal_cp_sizes, padded_length
from longshore.plan.simulate import make_timeline
from longshore.plan.types import Pack, Plan, PlanSetting, Round, Stats
from longshore.plan.types import Sequence as PlanSequence

TOKENS_ONLY = CostProfile(linear=1.0, quadratic=0.0, gather=(0.0, 0.0), node=8, pack=0.0, round=0.0)
MILLISECONDS = CostProfile(
    linear=1e-4, quadratic=1e-11, gather=(1e-6, 8e-6), node=8, pack=6e-3, round=0.0
)
RawPack = tuple[int, int, tuple[int, ...]]


def hand_made_plan(
    lengths: Sequence[int],
    rounds: Sequence[Sequence[RawPack]],
    *,
    lanes: int,
    profile: CostProfile = TOKENS_ONLY,
    policy: str = "mixed",
    sync: str = "round",
    capacity: int = 16384,
    pp: int = 1,
) -> Plan:
    """A plan from lengths and, for each round, packs (first_lane, cp_size, sequences)."""
    setting = PlanSetting(
        lanes=lanes,
        capacity=capacity,
        policy=policy,
        sync=sync,
        cp_sizes=legal_cp_sizes(lanes),
        profile=profile,
        align=1,
        max_sequences=None,
        pp=pp,
        vpp=1,
    )
    plan = Plan(
        setting=setting,
        sequences=tuple(PlanSequence(i, length, length) for i, length in enumerate(lengths)),
        rounds=tuple(Round(tuple(_pack(lengths, raw) for raw in packs)) for packs in rounds),
        stats=Stats(0, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0),
        digest="5f1c09e2a4b87d36",
    )
    return replace(plan, stats=_stats(plan))


def _pack(lengths: Sequence[int], raw: RawPack) -> Pack:
    first_lane, cp_size, members = raw
    tokens = sum(padded_length(lengths[i], cp_size) // cp_size for i in members)
    return Pack(first_lane, cp_size, members, tokens)


def _stats(plan: Plan) -> Stats:
    timeline = make_timeline(plan)
    setting = plan.setting
    lengths = [sequence.length for sequence in plan.sequences]
    held = sum(pack.tokens_per_lane * pack.cp_size for _, pack in plan.packs())
    ideal = setting.profile.ideal(lengths) / setting.lanes
    at_size: dict[int, int] = {}
    for _, pack in plan.packs():
        at_size[pack.cp_size] = at_size.get(pack.cp_size, 0) + len(pack.sequences)
    return Stats(
        predicted=timeline.total,
        lower_bound=ideal,
        gap=timeline.total / ideal - 1,
        efficiency=ideal / timeline.total,
        imbalance=timeline.idle,
        bubble=0.0,
        fill=held / (setting.lanes * len(plan.rounds) * setting.capacity),
        padding=1 - sum(lengths) / held,
        cp_histogram=tuple(sorted(at_size.items())),
        rounds=len(plan.rounds),
        tokens=sum(lengths),
        sum_squared_lengths=sum(n * n for n in lengths),
        planning_seconds=0.0123,
    )


def random_plan(
    lanes: int, *, rounds: int, seed: int, sync: str = "round", policy: str = "mixed"
) -> Plan:
    """Long sequences on aligned blocks of lanes, short ones beside them, to about equal cost."""
    rng = random.Random(seed)
    lengths: list[int] = []
    layout = [_random_round(rng, lanes, lengths) for _ in range(rounds)]
    return hand_made_plan(
        lengths, layout, lanes=lanes, profile=MILLISECONDS, sync=sync, policy=policy
    )


def _random_round(rng: random.Random, lanes: int, lengths: list[int]) -> list[RawPack]:
    packs: list[RawPack] = []

    def add(lane: int, size: int, tokens: list[int]) -> None:
        packs.append((lane, size, tuple(range(len(lengths), len(lengths) + len(tokens)))))
        lengths.extend(tokens)

    def split(lane: int, size: int, room: int) -> None:
        if size > 1 and rng.random() < 0.35 and room > 3000:
            taken = rng.randrange(room // 3, room)
            add(lane, size, [taken * size - rng.randrange(size)])
            room -= taken
        if size > 1:
            split(lane, size // 2, room)
            split(lane + size // 2, size // 2, room)
            return
        tokens = []
        while room > 600 and rng.random() < 0.95:
            tokens.append(min(room, int(rng.lognormvariate(7, 1))) or 1)
            room -= tokens[-1]
        if tokens:
            add(lane, 1, tokens)

    for lane in range(0, lanes, min(lanes, 64)):
        split(lane, min(lanes, 64), 12000)
    return sorted(packs, key=lambda pack: (-pack[1], pack[0]))


@pytest.fixture
def make() -> Callable[..., Plan]:
    return hand_made_plan


@pytest.fixture
def make_random() -> Callable[..., Plan]:
    return random_plan
