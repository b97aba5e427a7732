"""Corrections of a cost profile: what rounds consist of, and factors from measured times."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.plan.samples import CHARGED, examples, long_tail

from longshore.plan import make_plan
from longshore.plan.refine import (
    EVEN,
    FARTHEST,
    MOST_ROUNDS,
    Correction,
    ObservedRound,
    coefficients,
    predicted_seconds,
    refit,
    round_parts,
)
from longshore.plan.simulate import make_timeline, round_seconds

BASE = replace(CHARGED, quadratic=1e-4, round=20.0, node=2)


def plan_of(seed, *, lanes=4, count=24, profile=BASE, **options):
    lengths = long_tail(seed, count, most=8192 * min(lanes, 2))
    return make_plan(lengths, lanes=lanes, capacity=8192, profile=profile, **options)


def window(true, *, planned=BASE, steps=8, **options):
    """Rounds of several plans with the times of a machine whose profile is `true`."""
    rounds = []
    for seed in range(steps):
        plan = plan_of(seed, profile=planned, **options)
        # The lane that is slowest under the true profile decides how long a round takes.
        real = replace(plan, setting=replace(plan.setting, profile=true))
        for mine, theirs in zip(round_parts(plan), round_parts(real), strict=True):
            seconds = predicted_seconds(theirs.amounts, true)
            rounds.append(ObservedRound(mine.kind, mine.amounts, seconds))
    return rounds


def worst(rounds, profile):
    return max(abs(predicted_seconds(r.amounts, profile) / r.seconds - 1) for r in rounds)


@pytest.mark.property
@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 10_000),
    lanes=st.sampled_from([1, 2, 4, 8]),
    policy=st.sampled_from(["mixed", "static", "padded"]),
    buckets=st.sampled_from([(), (2048, 8192)]),
)
def test_parts_add_up_to_what_rounds_are_predicted(seed, lanes, policy, buckets):
    count = 6 if policy == "padded" else 24
    plan = plan_of(
        seed, lanes=lanes, count=count, policy=policy, min_cp=min(lanes, 2), buckets=buckets
    )
    predicted = [predicted_seconds(part.amounts, BASE) for part in round_parts(plan)]
    ends = make_timeline(plan).end.max(axis=1)
    assert predicted == pytest.approx(np.diff(ends, prepend=0.0), rel=1e-12)


def test_where_lanes_wait_once_a_step_each_group_is_a_round_of_its_own():
    plan = plan_of(3, lanes=8, sync="step")
    timeline = make_timeline(plan)
    for part in round_parts(plan):
        took = timeline.cost[part.round, part.lanes.start : part.lanes.stop].max()
        assert predicted_seconds(part.amounts, BASE) == pytest.approx(took, rel=1e-12)
    assert {part.kind for part in round_parts(plan)} > {1}
    many = plan_of(3, lanes=32, count=400, sync="step")
    assert len(round_parts(many)) == MOST_ROUNDS


def test_with_experts_over_ranks_mixers_and_tokens_have_their_own_slowest_lanes():
    plan = plan_of(5, lanes=4, count=48, ep=4)
    predicted = [predicted_seconds(part.amounts, BASE) for part in round_parts(plan)]
    assert predicted == pytest.approx(round_seconds(plan), rel=1e-9)


@pytest.mark.property
@settings(max_examples=examples(10))
@example(factors=(0.1, 0.1, 0.1, 0.1, 10.0, 0.1), seed=759).via("parts beyond the first limits")
@given(
    factors=st.tuples(*(st.sampled_from([0.1, 0.3, 1.0, 3.0, 10.0]) for _ in EVEN)),
    seed=st.integers(0, 1000),
)
def test_repeated_fits_find_what_explains_the_times(factors, seed):
    """Rounds as different as data can make them; no fit makes the error larger."""
    draw = np.random.default_rng(seed)
    true = Correction(parts=factors).applied(BASE)
    shares = draw.dirichlet([0.5] * len(EVEN), 40)
    rounds = []
    for share in shares:
        amounts = tuple((1000 * share / np.array(coefficients(BASE))).tolist())
        rounds.append(ObservedRound(1, amounts, predicted_seconds(amounts, true)))
    correction, errors = Correction(), []
    for _ in range(12):
        fitted = refit(rounds, BASE, correction)
        assert fitted is not None
        correction = fitted.correction
        errors.append(fitted.errors[1:])
        assert all(1 / FARTHEST <= part <= FARTHEST for part in correction.parts)
    assert errors[-1][1] <= 0.05
    assert errors[-1][1] <= errors[0][0] + 1e-12


def test_a_profile_with_too_small_a_quadratic_part_becomes_good():
    wrong = replace(BASE, quadratic=BASE.quadratic / 10)
    correction, errors = Correction(), []
    for _ in range(4):
        fitted = refit(window(BASE, planned=correction.applied(wrong)), wrong, correction)
        correction = fitted.correction
        errors.append(fitted.errors[1:])
    assert errors[0][0] > 0.15
    assert errors[-1][1] < 0.02
    linear, quadratic, *_ = correction.factors
    assert 0.8 < linear < 1.25
    assert 7 < quadratic < 12


def test_a_machine_of_another_speed_changes_no_plan():
    rounds = window(Correction(scale=1000.0).applied(BASE))
    correction = refit(rounds, BASE).correction
    assert correction.scale == pytest.approx(1000, rel=1e-5)
    assert correction.parts == pytest.approx(EVEN, abs=1e-6)
    before, after = plan_of(1), plan_of(1, profile=Correction(scale=1024.0).applied(BASE))
    assert after.digest == before.digest


@cache
def some_rounds():
    return window(replace(BASE, quadratic=BASE.quadratic * 3))


@pytest.mark.property
@settings(max_examples=examples(10))
@given(seed=st.integers(0, 1000))
def test_neither_order_nor_slow_rounds_matter(seed):
    draw, rounds = np.random.default_rng(seed), some_rounds()
    clean = refit(rounds, BASE)
    shuffled = [rounds[i] for i in draw.permutation(len(rounds))]
    assert refit(shuffled, BASE) == clean, "the same bits"
    slow = set(draw.choice(len(rounds), len(rounds) // 10, replace=False).tolist())
    hurt = [replace(r, seconds=r.seconds * (30 if i in slow else 1)) for i, r in enumerate(rounds)]
    robust = refit(hurt, BASE)
    assert robust.left_out >= len(slow)
    good = [r for i, r in enumerate(rounds) if i not in slow]
    alone = refit(good, BASE).correction.applied(BASE)
    assert worst(good, robust.correction.applied(BASE)) <= worst(good, alone) + 0.1


def test_nothing_changes_without_a_reason():
    rounds = window(BASE)
    fitted = refit(rounds, BASE)
    assert not fitted.is_changed
    assert fitted.correction == Correction()
    assert fitted.errors == pytest.approx((0, 0, 0), abs=1e-9)
    assert refit(rounds[:7], BASE) is None, "too few"
    assert refit([replace(r, seconds=0.0) for r in rounds], BASE) is None, "not measured"


def test_what_a_profile_does_not_have_stays_absent():
    base = replace(BASE, round=0.0, quadratic=0.0)
    corrected = refit(window(Correction(scale=2.0).applied(BASE)), base).correction.applied(base)
    assert (corrected.round, corrected.quadratic) == (0.0, 0.0)
    assert corrected.linear > base.linear
    huge = Correction(scale=1e300).applied(base)
    assert huge.linear < 1e16, "still a valid profile"


def test_ratios_of_each_kind():
    wrong = replace(BASE, quadratic=BASE.quadratic / 10)
    fitted = refit(window(BASE, planned=wrong), wrong)
    kinds, rounds, first, before, after = zip(*fitted.kinds, strict=True)
    assert list(kinds) == sorted(kinds)
    assert len(kinds) > 1
    assert sum(rounds) == fitted.rounds + fitted.left_out
    assert first == before
    assert abs(after[-1] - 1) < abs(before[-1] - 1)
