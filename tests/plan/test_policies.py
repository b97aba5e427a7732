from dataclasses import replace
from typing import Any

import pytest
from tests.plan.evaluator import step_seconds
from tests.plan.samples import CHARGED, FREE, TOKENS, long_tail

from longshore.plan import Plan, check, make_plan

Placed = tuple[int, int, tuple[int, ...]]


def plan_of(lengths: list[int], lanes: int, capacity: int, **asked: Any) -> Plan:
    plan = make_plan(lengths, lanes=lanes, capacity=capacity, **{"profile": TOKENS, **asked})
    check(plan)
    return plan


def places(plan: Plan) -> list[list[Placed]]:
    """The first lane, the CP size and the sequences of each pack of each round."""
    return [
        [(pack.first_lane, pack.cp_size, pack.sequences) for pack in round_.packs]
        for round_ in plan.rounds
    ]


# The examples of policies.py.
def test_static_fills_packs_in_the_order_of_arrival():
    assert places(plan_of([6, 3, 3], 2, 8, policy="static")) == [[(0, 1, (0,)), (1, 1, (1, 2))]]


def test_padded_runs_one_sequence_a_lane_as_long_as_the_longest():
    plan = plan_of([6, 3, 3], 2, 8, policy="padded")
    assert places(plan) == [[(0, 1, (0,)), (1, 1, (1,))], [(0, 1, (2,))]]
    assert [pack.tokens_per_lane for _, pack in plan.packs()] == [6, 6, 6]
    assert plan.stats.predicted == 12
    assert plan.stats.padding == pytest.approx(1 - 12 / 18)


def test_padded_splits_all_alike():
    plan = plan_of([10, 3], 4, 6, policy="padded")
    assert places(plan) == [[(0, 2, (0,)), (2, 2, (1,))]]
    assert [pack.tokens_per_lane for _, pack in plan.packs()] == [6, 6]


def test_static_never_goes_back_to_an_earlier_pack():
    plan = plan_of([5, 4, 3, 1], 1, 8, policy="static")
    assert places(plan) == [[(0, 1, (0,))], [(0, 1, (1, 2, 3))]]


def test_static_takes_the_smallest_size_at_which_all_fit():
    plan = plan_of([20, 3, 3, 3], 4, 10, policy="static")
    assert places(plan) == [[(0, 2, (0,)), (2, 2, (1, 2, 3))]]
    assert places(plan_of([20, 3], 4, 10, policy="static", cp_size=4)) == [[(0, 4, (0, 1))]]


def test_static_starts_a_new_pack_at_the_cap_on_sequences():
    plan = plan_of([1, 1, 1, 1, 1], 2, 8, policy="static", max_sequences=2)
    assert places(plan) == [[(0, 1, (0, 1)), (1, 1, (2, 3))], [(0, 1, (4,))]]


def test_static_leaves_lanes_beyond_the_last_whole_group_idle():
    plan = plan_of([8, 8], 6, 2, policy="static", cp_size=4)
    assert places(plan) == [[(0, 4, (0,))], [(0, 4, (1,))]]


@pytest.mark.parametrize("sync", ["round", "step"])
@pytest.mark.parametrize("profile", [FREE, CHARGED])
def test_balanced_is_the_best_of_its_sizes(sync: str, profile: Any):
    lengths = long_tail(5, 60, most=16000)
    asked = {"policy": "balanced", "sync": sync, "profile": profile}
    times = [
        plan_of(lengths, 12, 16384, cp_size=k, **asked).stats.predicted for k in (1, 2, 4, 8, 12)
    ]
    assert plan_of(lengths, 12, 16384, **asked).stats.predicted == min(times)


def test_balanced_evens_out_what_static_does_not():
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    balanced = plan_of(lengths, 2, 100, policy="balanced", cp_size=1)
    assert balanced.stats.predicted == 18
    assert plan_of(lengths, 2, 100, policy="static", cp_size=1).stats.predicted == 36


def test_dynamic_gives_the_long_one_more_lanes_and_no_lane_two_packs():
    dear = replace(TOKENS, gather=(0.1, 0.1), round=100.0)
    plan = plan_of([40, 15, 15], 4, 20, policy="dynamic", profile=dear)
    assert sorted((pack.cp_size, pack.sequences) for _, pack in plan.packs()) == [
        (1, (1,)),
        (1, (2,)),
        (2, (0,)),
    ]
    assert len(plan.rounds) == 1


def test_mixed_puts_short_sequences_beside_the_share_of_a_long_one():
    dear = replace(TOKENS, gather=(0.5, 0.5), round=1.0)
    plan = plan_of([8, 3, 3], 2, 7, profile=dear)
    assert [sorted(pack.sequences for pack in round_.packs) for round_ in plan.rounds] == [
        [(0,), (1,), (2,)]
    ]
    assert places(plan)[0][0] == (0, 2, (0,))
    assert plan.stats.predicted == 4 + 0.5 * 8 / 2 + 3 + 1
    # With one pack a lane the short ones wait for another round, or are split as well.
    assert plan_of([8, 3, 3], 2, 7, profile=dear, policy="dynamic").stats.predicted > 10


def test_one_size_is_offered_to_mixed_as_well():
    # Many rounds on few lanes: here one CP size is hard to beat.
    lengths = [131072, *[1500] * 90]
    mixed = plan_of(lengths, 8, 16384, profile=CHARGED)
    balanced = plan_of(lengths, 8, 16384, profile=CHARGED, policy="balanced")
    assert mixed.stats.predicted <= balanced.stats.predicted


@pytest.mark.parametrize("sync", ["round", "step"])
def test_given_packs_are_kept_and_placed_level(sync: str):
    packs = [[0, 3], [1], [2], [4]]
    plan = plan_of([10, 20, 20, 10, 20], 2, 20, policy="given", packs=packs, sync=sync)
    assert sorted(pack.sequences for _, pack in plan.packs()) == [(0, 3), (1,), (2,), (4,)]
    assert plan.stats.predicted == 40


def test_a_given_pack_is_split_as_far_as_it_needs():
    plan = plan_of([30, 30, 5], 4, 20, policy="given", packs=[[0, 1], [2]])
    assert {pack.sequences: pack.cp_size for _, pack in plan.packs()}[(0, 1)] == 4


def test_lanes_that_run_free_wait_for_nobody():
    dear = replace(TOKENS, gather=(9.0, 9.0))
    assert plan_of([9, 8, 7, 2], 2, 9, profile=dear).stats.predicted == 16
    assert plan_of([9, 8, 7, 2], 2, 9, profile=dear, sync="step").stats.predicted == 15


@pytest.mark.parametrize("sync", ["round", "step"])
@pytest.mark.parametrize("policy", ["static", "balanced", "dynamic", "mixed"])
def test_the_cap_on_sequences_holds_and_does_not_fail(policy: str, sync: str):
    lengths = [50, *[1] * 30]
    plan = plan_of(lengths, 4, 20, policy=policy, sync=sync, max_sequences=1)
    # One of 4 lanes for each, and the long one takes all four.
    assert len(plan.rounds) >= 9


@pytest.mark.parametrize("policy", ["padded", "static", "balanced", "dynamic", "mixed"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (3, 2), (4, 3)])
def test_every_policy_suits_a_pipeline(policy: str, pp: int, vpp: int):
    plan = plan_of(long_tail(1, 9, most=900), 3, 1000, policy=policy, pp=pp, vpp=vpp)
    assert vpp == 1 or len(plan.rounds) % pp == 0
    assert plan.stats.predicted == pytest.approx(step_seconds(plan), rel=1e-9)
    assert plan.stats.bubble > 0


def test_a_pipeline_splits_rounds_to_shrink_the_bubble():
    # In one round four ranks would run one after the other: 4·40 seconds.
    plan = plan_of([10] * 16, 4, 40, pp=4)
    assert len(plan.rounds) >= 4
    assert plan.stats.predicted <= 4 * 10 + 3 * 10


def test_fixed_packs_are_not_split_for_a_pipeline():
    packs = [[0, 1], [2, 3]]
    plan = plan_of([10] * 4, 2, 40, policy="given", packs=packs, pp=4, vpp=2)
    assert sorted(pack.sequences for _, pack in plan.packs()) == [(0, 1), (2, 3)]


def test_lanes_that_run_free_are_not_slower_than_lanes_that_meet():
    # The best plan of lanes that meet is a plan of lanes that run free, and there takes no longer.
    meet, free = (
        plan_of([35, 13, 36, 46], 4, 20, profile=CHARGED, sync=sync).stats.predicted
        for sync in ("round", "step")
    )
    assert free <= meet * (1 + 1e-9)


DEAR_ROUNDS = replace(TOKENS, gather=(0.1, 0.1), round=100.0)


def test_lanes_that_run_free_join_packs_where_rounds_are_dear():
    plan = plan_of([8, 3, 3], 2, 7, profile=DEAR_ROUNDS, sync="step")
    assert len(plan.rounds) == 1
    assert plan.stats.predicted == pytest.approx(4 + 0.1 * 8 / 2 + 3 + 100)


def test_lanes_that_run_free_join_no_more_than_they_hold():
    # Beside 4 tokens of the first a lane holds 3 more.
    assert len(plan_of([8, 5, 5], 2, 7, profile=DEAR_ROUNDS, sync="step").rounds) == 2
    capped = {"profile": DEAR_ROUNDS, "sync": "step", "max_sequences": 1}
    assert len(plan_of([8, 3, 3], 2, 7, **capped).rounds) == 2
