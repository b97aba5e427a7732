from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from tests.plan.brute_force import Group, Tiny, best_time, groups_of
from tests.plan.evaluator import padded, step_seconds
from tests.plan.samples import CHARGED, FREE, TOKENS, examples

from longshore.plan import CostProfile, Pack, Plan, Round, check, make_plan

PROFILES = {"free": FREE, "charged": CHARGED}
SEEDS = range(examples(60, fuzz=500))
KINDS = [(profile, sync) for profile in PROFILES for sync in ("round", "step")]


def tiny(seed: int, *, profile: str, sync: str) -> Tiny:
    """Up to 6 sequences of 100 to 20000 tokens on up to 4 lanes."""
    rng = np.random.default_rng(seed)
    lanes, count = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    capacity = int(rng.integers(4096, 16385))
    even = rng.integers(100, 20001, count)
    skewed = np.exp(rng.uniform(np.log(100), np.log(20000), count)).astype(int)
    # A group's lanes hold an even number of tokens each.
    lengths = np.minimum([even, skewed][seed % 2], lanes * (capacity // 2 * 2))
    return Tiny(tuple(lengths.tolist()), lanes, capacity, PROFILES[profile], sync)


def planned(problem: Tiny) -> Plan:
    return make_plan(
        problem.lengths,
        lanes=problem.lanes,
        capacity=problem.capacity,
        profile=problem.profile,
        sync=problem.sync,
    )


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("profile", "sync"),
    [*KINDS[::2], *(pytest.param(*k, marks=pytest.mark.long) for k in KINDS[1::2])],
)
def test_mixed_is_near_the_best_there_is(profile: str, sync: str):
    gaps = []
    for seed in SEEDS:
        problem = tiny(seed, profile=profile, sync=sync)
        plan, best = planned(problem), best_time(problem)
        check(plan)
        assert step_seconds(plan) >= best * (1 - 1e-9), seed
        assert plan.stats.lower_bound <= best * (1 + 1e-9), seed
        gaps.append(plan.stats.predicted / best - 1)
    assert np.median(gaps) <= 0.01
    assert max(gaps) <= 0.10, f"seed {SEEDS[int(np.argmax(gaps))]}"


# Where padding and the cost of packs weigh as much as the tokens, two items of one length may need
# different CP sizes.
SHORT = [
    Tiny((2, 15, 6, 12), 4, 7, FREE, "round"),
    Tiny((11, 8, 9), 3, 9, FREE, "step"),
    Tiny((4, 4, 4, 4), 3, 6, CHARGED, "round"),
    Tiny((1, 8, 8, 15, 3), 3, 14, CHARGED, "round"),
    Tiny((14, 40, 4, 2, 11, 48), 3, 43, CHARGED, "round"),
    Tiny((60, 55, 19, 38), 3, 59, CHARGED, "step"),
    Tiny((123, 162, 131, 38, 248), 3, 125, CHARGED, "round"),
]


@pytest.mark.parametrize("problem", SHORT, ids=lambda problem: str(problem.lengths))
def test_mixed_is_near_the_best_there_is_for_very_short_sequences(problem: Tiny):
    assert planned(problem).stats.predicted <= 1.1 * best_time(problem)


def every_plan(problem: Tiny) -> Iterator[Plan]:
    """Every way to give each sequence a round and a group; many are not valid."""
    plan = planned(problem)
    places = list(product(range(len(problem.lengths)), groups_of(problem.lanes)))
    for choice in product(places, repeat=len(problem.lengths)):
        rounds = []
        for number in range(len(problem.lengths)):
            held: dict[Group, list[int]] = {}
            for sequence, (round_, group) in enumerate(choice):
                if round_ == number:
                    held.setdefault(group, []).append(sequence)
            rounds.append(Round(tuple(packs_of(problem, held))))
        yield replace(plan, rounds=tuple(rounds))


def packs_of(problem: Tiny, held: dict[Group, list[int]]) -> Iterator[Pack]:
    for group in sorted(held, key=lambda group: (-group.cp_size, group.first_lane)):
        tokens = sum(padded(problem.lengths[i], group.cp_size) for i in held[group])
        size = group.cp_size
        yield Pack(group.first_lane, size, tuple(held[group]), tokens // size)


def is_valid(plan: Plan) -> bool:
    try:
        check(plan)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9000, 400, 1100), (3000, 2900, 2700), (300, 200, 100)])
@pytest.mark.parametrize("sync", ["round", "step"])
def test_brute_force_is_the_best_of_every_plan_written_out(lengths: tuple[int, ...], sync: str):
    problem = Tiny(lengths, 3, 3100, CHARGED, sync)
    times = [step_seconds(plan) for plan in every_plan(problem) if is_valid(plan)]
    assert best_time(problem) == pytest.approx(min(times), rel=1e-12)


def time_of(
    lengths: tuple[int, ...], lanes: int, capacity: int, profile: CostProfile
) -> list[float]:
    return [best_time(Tiny(lengths, lanes, capacity, profile, s)) for s in ("round", "step")]


def test_one_lane_by_hand():
    assert time_of((5, 3), 1, 8, TOKENS) == [8, 8]
    # Two rounds, or one: a pack each time.
    dear = replace(TOKENS, pack=10.0)
    assert time_of((5, 3), 1, 8, dear) == [18, 18]
    assert time_of((5, 3), 1, 7, dear) == [28, 28]


def test_a_split_by_hand():
    assert time_of((8, 3, 3), 2, 7, TOKENS) == [7, 7]
    # Together they would take 8 tokens of lane 0; one after the other, both ends are level.
    assert time_of((8, 4, 4), 2, 7, TOKENS) == [8, 8]
    # Split: 4 + 0.75·8/2 = 7. Whole: 8.
    assert time_of((8,), 2, 8, replace(TOKENS, gather=(0.75, 0.75))) == [7, 7]
    assert time_of((8,), 2, 8, replace(TOKENS, gather=(1.25, 1.25))) == [8, 8]


def test_meeting_after_each_round_costs_time_by_hand():
    # Splitting is too dear. Lanes that meet run 9 beside 8, then 7 beside 2; lanes that do not,
    # 9 and 2 beside 8 and 7.
    dear = replace(TOKENS, gather=(9.0, 9.0))
    assert time_of((9, 8, 7, 2), 2, 9, dear) == [9 + 7, 15]


def test_the_cap_on_sequences_by_hand():
    capped = Tiny((2, 2, 2), 1, 9, replace(TOKENS, pack=1.0), "round", max_sequences=1)
    assert best_time(capped) == 9
    assert best_time(replace(capped, max_sequences=2)) == 8
    assert best_time(replace(capped, sync="step")) == 9
    assert best_time(replace(capped, sync="step", max_sequences=3)) == 7
