"""The benchmark's evaluator of experts and pipelines, apart from the planner and beside it."""

import pytest
from bench.evaluate import Setting, experts_bound, pipeline_time, round_heights, score
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.samples import examples

from longshore.plan import make_plan
from longshore.plan.as_json import step_as_json
from longshore.plan.cost import parse_profile

PROFILE = {"linear": 1.0, "quadratic": 1e-4, "gather": [0.01, 0.08], "node": 2}
PROFILE |= {"pack": 64, "round": 5}
LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=24)


def test_rounds_of_a_pipeline():
    # The worked example of plan/pipeline.py.
    assert pipeline_time([9, 3, 3], 1) == pytest.approx(15)
    assert pipeline_time([9, 3, 3], 2) == pytest.approx(24)
    assert pipeline_time([3, 9, 3], 2) == pytest.approx(21)


def test_each_part_of_a_round_with_experts_has_its_own_slowest_lane():
    profile = {"linear": 1, "quadratic": 0.1, "gather": [0, 0], "node": 8, "pack": 0, "round": 0}
    setting = Setting([10, 15], 2, 100, profile, "round")
    packs = [{"first_lane": i, "cp_size": 1, "sequences": [i]} for i in range(2)]
    step = {"rounds": [{"packs": packs}]}
    assert round_heights(step, setting) == [15 + 22.5]
    setting = Setting([10, 4, 4, 4], 2, 100, profile, "round")
    packs[1]["sequences"] = [1, 2, 3]
    # Mixers: 0.25·10 + 10 and 0.25·12 + 4.8; experts: 7.5 and 9. The slowest lane alone takes 20.
    assert round_heights(step, setting) == [20]
    assert round_heights(step, setting, mixer_share=0.25) == [pytest.approx(12.5 + 9)]


@pytest.mark.slow
@pytest.mark.property
@settings(max_examples=examples(50, fuzz=2_000))
@given(
    lengths=LENGTHS,
    pp=st.sampled_from([1, 2, 4]),
    share=st.floats(0, 1),
    padding=st.sampled_from([(1, ()), (1, (700, 2048)), (128, ()), (64, (1024, 2048))]),
)
def test_the_evaluator_agrees_with_the_planner_and_experts_cost_no_less(
    lengths, pp, share, padding
):
    profile, (align, buckets) = parse_profile(PROFILE, "test"), padding
    asked = {"lanes": 4, "capacity": 2048, "profile": profile, "align": align, "buckets": buckets}
    plan = make_plan(lengths, pp=pp, **asked)
    setting = Setting(lengths, 4, 2048, PROFILE, "round", align, buckets)
    step = step_as_json(plan)
    assert not score(step, setting).faults
    heights = round_heights(step, setting)
    if pp == 1:
        assert score(step, setting).predicted == pytest.approx(plan.stats.predicted, rel=1e-6)
    assert pipeline_time(heights, pp) == pytest.approx(plan.stats.predicted, rel=1e-6)
    apart = round_heights(step, setting, mixer_share=share)
    pairs = zip(heights, apart, strict=True)
    assert all(together <= parts * (1 + 1e-12) for together, parts in pairs)
    # Balanced plans are tried too: no plan ends before the bound, whatever it was made for.
    for other in (
        plan,
        make_plan(lengths, cp_size=4, policy="balanced", **asked),
    ):
        times = round_heights(step_as_json(other), setting, mixer_share=share)
        assert sum(times) >= experts_bound(setting, mixer_share=share) * (1 - 1e-9)
