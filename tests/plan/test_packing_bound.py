from dataclasses import replace
from typing import Any

import pytest
from bench import evaluate
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.brute_force import Tiny, best_time
from tests.plan.samples import CHARGED, FREE, TOKENS, long_tail

from longshore.plan import CostProfile, make_plan

DEAR = replace(TOKENS, gather=(0.5, 0.5))


def bound_of(lengths: list[int], lanes: int, capacity: int, **asked: Any) -> float:
    asked = {"profile": TOKENS, **asked}
    return make_plan(lengths, lanes=lanes, capacity=capacity, **asked).stats.lower_bound


# In each of these a plan reaches the bound, so no bound can be higher.
@pytest.mark.parametrize("sync", ["round", "step"])
@pytest.mark.parametrize(
    ("lengths", "lanes", "capacity", "profile", "bound"),
    [
        # The area of both, spread over the lanes: the example of bound.py.
        ([8, 2], 2, 8, TOKENS, 5),
        # One lane does everything, in one pack.
        ([5, 7], 1, 100, replace(TOKENS, pack=3.0, round=2.0), 12 + 3 + 2),
        # Two packs of a lane, because one holds 8 tokens.
        ([8, 8], 1, 8, replace(TOKENS, pack=3.0), 16 + 2 * 3),
        # The longest alone decides: 24 + 0.5·96·3/4 at CP size 4, more at 1 and 2.
        ([96], 4, 100, DEAR, 60),
        # Nor is it split further than pays: 50 + 2·100/2 at CP size 2 is more than 100.
        ([100], 2, 100, replace(TOKENS, gather=(2.0, 2.0)), 100),
        # A sequence that fits no single lane must be split, whatever that costs.
        ([100], 2, 50, replace(TOKENS, gather=(2.0, 2.0)), 50 + 2 * 100 / 2),
        # Two lanes are busy with the long one, the others take the short ones whole.
        ([200, 75, 75], 4, 200, replace(TOKENS, gather=(0.5, 9.0), node=2), 150),
    ],
)
def test_the_bound_by_hand(
    lengths: list[int],
    lanes: int,
    capacity: int,
    profile: CostProfile,
    bound: float,
    sync: str,
):
    found = bound_of(lengths, lanes, capacity, profile=profile, sync=sync)
    assert found == pytest.approx(bound, rel=1e-6)


def test_padding_counts_in_the_bound():
    # 9 tokens are padded to 12 at CP size 6, the only one: 2 for each lane.
    assert bound_of([9], 6, 100, min_cp=6) == pytest.approx(2, rel=1e-6)


def test_lanes_that_meet_wait_for_what_does_not_fit_beside_the_longest():
    # The longest takes 1100 seconds, whole; of the 500 tokens of the others its round holds 300,
    # so 200 tokens take four lanes another 50 seconds, and a little for their squares.
    dear = replace(TOKENS, quadratic=0.1, gather=(500.0, 500.0))
    lengths = [100, *[1] * 500]
    assert 1150 <= bound_of(lengths, 4, 100, profile=dear) * (1 + 1e-6) <= 1156
    assert 1100 <= bound_of(lengths, 4, 100, profile=dear, sync="step") * (1 + 1e-6) <= 1156


def test_a_size_that_only_fits_without_its_pack_does_not_count():
    # By 105 seconds the longest can end only at CP size 2, at an area of 150, since whole it takes
    # 100 and 10 for its pack: (150 + 40 + 2·10) / 2. The best plan ends it whole, after 110.
    profile = replace(DEAR, pack=10.0)
    assert 105 <= bound_of([100, 20, 20], 2, 200, profile=profile) * (1 + 1e-6) <= 110.001


@pytest.mark.parametrize("policy", ["padded", "static", "balanced", "dynamic"])
def test_every_policy_has_the_same_bound(policy: str):
    lengths = long_tail(3, 20, most=4000)
    bound = bound_of(lengths, 4, 4000, profile=CHARGED)
    assert bound_of(lengths, 4, 4000, profile=CHARGED, policy=policy) == bound


@pytest.mark.parametrize("profile", [FREE, CHARGED])
@pytest.mark.parametrize("sync", ["round", "step"])
@pytest.mark.parametrize(("lanes", "capacity"), [(6, 32768), (8, 16384), (32, 16384)])
def test_the_bound_is_at_least_the_formula_of_the_design(
    profile: CostProfile, sync: str, lanes: int, capacity: int
):
    lengths = long_tail(lanes, 200, most=lanes * capacity)
    asked = evaluate.Setting(lengths, lanes, capacity, profile.as_json(), sync)
    found = bound_of(lengths, lanes, capacity, profile=profile, sync=sync)
    assert found >= evaluate.lower_bound(asked) * (1 - 1e-6)


TINY = st.builds(
    Tiny,
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4).map(tuple),
    lanes=st.integers(2, 4),
    capacity=st.sampled_from([30, 40, 64]),
    profile=st.sampled_from(
        [TOKENS, DEAR, replace(DEAR, pack=20.0), replace(DEAR, quadratic=0.1, pack=1.0)]
    ),
    sync=st.sampled_from(["round", "step"]),
    max_sequences=st.sampled_from([1, 2, 99]),
)


@pytest.mark.property
@given(TINY)
def test_nothing_beats_the_bound(tiny: Tiny):
    found = bound_of(
        list(tiny.lengths),
        tiny.lanes,
        tiny.capacity,
        profile=tiny.profile,
        sync=tiny.sync,
        max_sequences=tiny.max_sequences,
    )
    assert found <= best_time(tiny) * (1 + 1e-9)


@pytest.mark.property
@given(TINY, st.sampled_from([20.0, 500.0]))
def test_nothing_beats_the_bound_where_rounds_cost_time(tiny: Tiny, overhead: float):
    tiny = replace(tiny, sync="round", profile=replace(tiny.profile, round=overhead))
    found = bound_of(list(tiny.lengths), tiny.lanes, tiny.capacity, profile=tiny.profile)
    assert found <= best_time(replace(tiny, max_sequences=99)) * (1 + 1e-9)


def test_the_bound_allows_for_larger_groups_that_pad_less():
    # CP sizes 4 and 6: 9 tokens are padded to 16 or to 12, so one pack of 6 holds all three.
    heavy = replace(TOKENS, pack=100.0)
    plan = make_plan([9] * 3, lanes=6, capacity=6, min_cp=4, profile=heavy)
    assert plan.stats.predicted == pytest.approx(106)
    assert plan.stats.lower_bound <= plan.stats.predicted * (1 + 1e-9)
