"""Policies of a user's own: this module's functions are named as tests.plan.test_own_policy:…"""

import re

import numpy as np
import pytest

from longshore.plan import check, make_plan

LENGTHS = [9, 3, 3, 2]
HERE = "tests.plan.test_own_policy"


def one_a_round(task, choice):
    for place in range(len(task.lengths)):
        assert task.costs_at(1)[place] > 0
    return choice.offer_rounds([[(0, 1, [place])] for place in range(len(task.lengths))])


def slow_then_fast(task, choice):
    slow = one_a_round(task, choice)
    fast = choice.offer_packs([(2, np.arange(len(task.lengths)))])
    assert 0 < fast < slow == one_a_round(task, choice)


def two_on_a_lane(task, choice):
    choice.offer_rounds([[(1, np.int64(1), (1, 2, 3)), (0, 2, [0])]])


def nothing(task, choice):
    pass


def twice(task, choice):
    choice.offer_packs([(1, [0, 1, 2, 3]), (1, [3])])


def too_wide(task, choice):
    choice.offer_packs([(4, [0, 1, 2, 3])])


def beyond(task, choice):
    choice.offer_packs([(1, [0, 4])])


def in_floats(task, choice):
    choice.offer_packs([(1, [0.0, 1, 2, 3])])


def without_a_lane(task, choice):
    choice.offer_rounds([[(1, [0, 1, 2, 3])]])


def crooked(task, choice):
    choice.offer_rounds([[(1, 2, [0, 1, 2, 3])]])


def overfull(task, choice):
    choice.offer_rounds([[(0, 1, [0, 1, 2, 3])]])


not_a_function = 3


def plan_by(name, capacity=20, **options):
    policy = f"{HERE}:{name}"
    return make_plan(LENGTHS, lanes=2, capacity=capacity, policy=policy, **options)


def packs_of(plan):
    return [(number, p.first_lane, p.cp_size, p.sequences) for number, p in plan.packs()]


def test_rounds_stay_as_they_were_offered():
    plan = plan_by("one_a_round")
    check(plan)
    assert packs_of(plan) == [(i, 0, 1, (i,)) for i in range(4)]
    assert plan.setting.policy == f"{HERE}:one_a_round"


def test_the_fastest_offer_is_kept():
    assert packs_of(plan_by("slow_then_fast")) == [(0, 0, 2, (0, 1, 2, 3))]


def test_a_lane_may_have_several_packs():
    plan = plan_by("two_on_a_lane")
    assert packs_of(plan) == [(0, 0, 2, (0,)), (0, 1, 1, (1, 2, 3))]
    assert all(type(p.cp_size) is int for _, p in plan.packs())


def test_a_pipeline_reorders_its_rounds_and_splits_none():
    plan = plan_by("one_a_round", pp=2)
    assert sorted(p.sequences for _, p in plan.packs()) == [(0,), (1,), (2,), (3,)]


WRONG = {
    "nothing": "it offered no rounds",
    "twice": "sequence 3: it is in the plan 2 times; it must be there once",
    "too_wide": "CP size 4 is not legal; legal are 1, 2",
    "beyond": "there is no sequence 4; sequences are numbered 0 to 3",
    "in_floats": "a pack must be (first_lane, cp_size, sequences), all integers",
    "without_a_lane": "a pack must be (first_lane, cp_size, sequences), all integers",
    "crooked": "round 0, lane 1: a pack of CP size 2 must start at a multiple of 2",
    "overfull": "round 0, lane 0: 17 tokens, but the capacity is 16",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_offer_names_the_policy(name):
    expected = re.escape(f"plan.policy {HERE}:{name}: {WRONG[name]}")
    with pytest.raises(ValueError, match=f"^{expected}"):
        plan_by(name, capacity=16)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("nowhere:greedy", ": there is no module nowhere; start in the folder that contains it"),
        (f"{HERE}:missing", f": {HERE} has no missing; define it in {__file__} as a function"),
        (f"{HERE}:not_a_function", f": {HERE}:not_a_function is not a function but of type int"),
        ("a b:c", " is 'a b:c'; it must be mixed, dynamic"),
        (["mixed"], " is ['mixed']; it must be mixed, dynamic"),
    ],
)
def test_what_is_no_policy_is_refused(policy, message):
    with pytest.raises(ValueError, match=f"^plan.policy{re.escape(message)}"):
        make_plan(LENGTHS, lanes=2, capacity=20, policy=policy)


def test_it_takes_no_cp_size_and_no_packs():
    with pytest.raises(ValueError, match="cp_size works only with the policies"):
        plan_by("one_a_round", cp_size=2)
    with pytest.raises(ValueError, match="packs work only with policy 'given'"):
        plan_by("one_a_round", packs=[[0, 1, 2, 3]])
