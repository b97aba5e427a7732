from dataclasses import replace

import numpy as np
import pytest

from longshore.plan.cost import CostProfile
from longshore.plan.planner import make_plan
from longshore.plan.simulate import make_timeline, simulate


def test_sync_round_waits_for_the_slowest_lane(make):
    plan = make([4, 1, 3, 3], [[(0, 1, (0,)), (1, 1, (1,))], [(0, 1, (2,)), (1, 1, (3,))]], lanes=2)
    timeline = make_timeline(plan)
    assert timeline.start.tolist() == [[0, 0], [4, 4]]
    assert timeline.cost.tolist() == [[4, 1], [3, 3]]
    assert timeline.end.tolist() == [[4, 4], [7, 7]]
    assert timeline.total == 7
    assert timeline.idle == pytest.approx(3 / 14)


def test_sync_step_joins_only_lanes_that_share_a_pack(make):
    rounds = [
        [(0, 1, (0,)), (1, 1, (1,)), (2, 1, (2,))],
        [(0, 2, (3,)), (2, 1, (4,)), (3, 1, (5,))],
        [(2, 2, (6,))],
    ]
    timeline = make_timeline(make([5, 2, 1, 8, 3, 2, 4], rounds, lanes=4, sync="step"))
    assert timeline.start.tolist() == [[0, 0, 0, 0], [5, 5, 1, 0], [9, 9, 4, 4]]
    assert timeline.end.tolist() == [[5, 2, 1, 0], [9, 9, 4, 2], [9, 9, 6, 6]]
    assert timeline.total == 9


def test_packs_of_a_lane_follow_each_other(make):
    plan = make([8, 3, 2], [[(0, 2, (0,)), (0, 1, (2,)), (1, 1, (1,))]], lanes=2)
    timeline = make_timeline(plan)
    assert [starts.tolist() for starts in timeline.pack_start] == [[0, 0], [4], [4]]
    assert timeline.pack_cost == [4, 2, 3]
    assert timeline.cost.tolist() == [[6, 7]]


def test_groups_that_do_not_nest_start_at_different_times(make):
    plan = make([12, 8], [[(0, 3, (0,)), (2, 2, (1,))]], lanes=4)
    starts = make_timeline(plan).pack_start
    assert [row.tolist() for row in starts] == [[0, 0, 0], [4, 0]]


def test_pack_and_round_costs(make):
    profile = CostProfile(
        linear=1.0, quadratic=0.5, gather=(0.25, 0.5), node=8, pack=10.0, round=100.0
    )
    rounds = [[(0, 2, (0,)), (0, 1, (1,))], []]
    timeline = make_timeline(make([6, 2], rounds, lanes=2, profile=profile))
    long = 10 + (8 + 18) / 2 + 0.25 * 8 / 2
    assert timeline.pack_cost == [long, 10 + 2 + 2]
    assert timeline.cost.tolist() == [[100 + long + 14, 100 + long], [100, 100]]
    assert [starts.tolist() for starts in timeline.pack_start] == [[100, 100], [100 + long]]


def test_in_sync_step_a_lane_without_packs_skips_the_round(make):
    profile = CostProfile(linear=1.0, quadratic=0.0, gather=(0.0, 0.0), node=8, pack=0.0, round=7.0)
    plan = make([6, 2], [[(0, 1, (0,))], [(1, 1, (1,))]], lanes=2, profile=profile, sync="step")
    assert make_timeline(plan).cost.tolist() == [[13, 0], [0, 9]]


def test_padded_makes_every_sequence_as_long_as_the_longest(make):
    plan = make([9, 2], [[(0, 1, (0,)), (1, 1, (1,))]], lanes=2, policy="padded")
    assert make_timeline(plan).cost.tolist() == [[9, 9]]


@pytest.mark.parametrize("sync", ["round", "step"])
@pytest.mark.parametrize("lanes", [1, 4, 64])
@pytest.mark.parametrize("align", [1, 100])
def test_agrees_with_the_simulator(make_random, sync, lanes, align):
    plan = make_random(lanes, rounds=3, seed=lanes, sync=sync)
    plan = replace(plan, setting=replace(plan.setting, align=align))
    timeline, simulated = make_timeline(plan), simulate(plan)
    assert timeline.total == pytest.approx(simulated.span, rel=1e-9)
    assert timeline.idle == pytest.approx(simulated.imbalance, abs=1e-9)
    assert np.allclose(timeline.cost.sum(axis=0), simulated.busy, rtol=1e-9)


def test_experts_over_ranks_make_rounds_longer_than_their_slowest_lane():
    lengths = [300] + [30] * 40 + [20] * 12
    profile = CostProfile(
        linear=1.0, quadratic=0.01, gather=(0.01, 0.02), node=2, pack=5.0, round=3.0
    )
    plan = make_plan(lengths, lanes=4, capacity=1024, max_cp=1, ep=4, profile=profile)
    timeline, simulated = make_timeline(plan), simulate(plan)
    assert timeline.total == pytest.approx(plan.stats.predicted)
    np.testing.assert_allclose(timeline.cost.sum(axis=0), simulated.busy)
    assert timeline.idle == pytest.approx(plan.stats.imbalance)
    taken = timeline.end[:, 0] - timeline.start[:, 0]
    assert (taken >= timeline.cost.max(axis=1) - 1e-9).all()
    assert (taken > timeline.cost.max(axis=1) + 1e-9).any()
