import doctest
import re
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from tests.plan.samples import CHARGED, FREE, TOKENS, long_tail

from longshore.plan import Plan, Sequence, check, make_plan, planner
from longshore.plan.simulate import simulate

NUMBERS = (
    "lanes",
    "capacity",
    "cp_size",
    "min_cp",
    "max_cp",
    "max_sequences",
    "align",
    "pp",
    "vpp",
)


Json = dict[str, Any]


def plan_of(lengths: Any, **asked: Any) -> Plan:
    plan = make_plan(lengths, **{"lanes": 4, "capacity": 100, "profile": TOKENS, **asked})
    check(plan)
    return plan


def refusal(lengths: Any, **asked: Any) -> str:
    """The one line that says why there is no plan."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan_of(lengths, **asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_examples_of_the_module():
    assert doctest.testmod(planner).failed == 0


def test_no_sequences_are_refused():
    for nothing in ([], np.array([], dtype=int), iter(())):
        assert refusal(nothing) == "there are no sequences to plan; give at least one length"


@pytest.mark.parametrize(
    "length", [1.0, 2.5, True, False, np.float64(3), np.bool_(True), "12", None, [3], float("nan")]
)
def test_a_length_that_is_no_whole_number_is_refused(length: object):
    message = refusal([5, 6, length])
    assert message.startswith("sequence 2: its length is ")
    assert repr(length) in message
    assert "not a whole number" in message


@pytest.mark.parametrize("length", [0, -1, np.int64(0), np.int8(-3)])
def test_a_length_below_one_is_refused(length: int):
    message = refusal([5, length, 6])
    assert message.startswith(f"sequence 1: its length is {length}; ")
    assert "leave empty ones out" in message


@pytest.mark.parametrize("length", [0, -5, True, 2.0])
def test_the_length_of_a_sequence_object_is_looked_at_too(length: Any):
    assert refusal([5, Sequence(7, length, 0)]).startswith("sequence 1: its length is ")


def test_a_length_beyond_64_bits_is_refused():
    assert refusal([5, 10**30]).startswith("sequence 1: its ")
    assert refusal([5, 2**63 - 1]).startswith("sequence 1: its ")


def test_a_capacity_beyond_64_bits_is_a_plan_or_refused():
    for capacity in (2**62, 2**63, 2**70):
        with suppress(ValueError):
            assert plan_of([5, 6], capacity=capacity).stats.rounds == 1


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.uint64, np.int64])
def test_numpy_integers_are_integers(kind: type):
    plain = plan_of([100, 3, 27], lanes=2, capacity=60)
    numpy = plan_of(np.array([100, 3, 27], dtype=kind), lanes=kind(2), capacity=kind(60))
    assert numpy.rounds == plain.rounds
    assert numpy.setting == plain.setting
    assert numpy.digest == plain.digest
    assert {type(sequence.length) for sequence in numpy.sequences} == {int}
    assert {type(i) for _, pack in numpy.packs() for i in pack.sequences} == {int}


def test_sequence_objects_keep_their_names():
    own = [Sequence(70, 20, 11), Sequence(71, 30, 0)]
    plan = plan_of(own)
    assert plan.sequences == tuple(own)
    assert plan.digest == plan_of([20, 30]).digest


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 1.0, True, np.bool_(True), np.float32(2), "2"])
def test_every_number_must_be_whole_and_positive(name: str, value: Any):
    assert refusal([5], **{name: value}).startswith(f"{planner.KEYS[name]} is {value!r};")


# A sequence of 1000 tokens and what does not hold it.
TOO_LONG = {
    "all lanes": {"lanes": 4, "capacity": 100},
    "alignment": {"lanes": 4, "capacity": 255, "align": 16},
    "the largest size allowed": {"lanes": 16, "capacity": 100, "max_cp": 4},
    "one size for all": {"lanes": 16, "capacity": 100, "policy": "static", "cp_size": 2},
    "the largest one size": {"lanes": 4, "capacity": 100, "policy": "balanced", "cp_size": 4},
    "padded": {"lanes": 4, "capacity": 100, "policy": "padded"},
    "an odd number of lanes": {"lanes": 6, "capacity": 150, "policy": "dynamic"},
}


@pytest.mark.parametrize("case", TOO_LONG)
def test_a_sequence_that_is_too_long_is_named_with_the_limit(case: str):
    asked = TOO_LONG[case]
    message = refusal([10, 1000, 20], **asked)
    assert message.startswith("sequence 1: its 1000 tokens do not fit")
    room = asked["capacity"] // asked.get("align", 1) * asked.get("align", 1)
    assert f"into {asked['lanes']} lanes of {room} tokens" in message


def advised_capacity(message: str) -> int:
    found = re.search(r"raise plan.capacity to (\d+)", message)
    assert found
    return int(found[1])


@pytest.mark.parametrize("case", TOO_LONG)
def test_the_advised_capacity_works_and_no_smaller_one_does(case: str):
    asked = TOO_LONG[case]
    capacity = advised_capacity(refusal([1000, 1000], **asked))
    plan_of([1000, 1000], **{**asked, "capacity": capacity})
    refusal([1000, 1000], **{**asked, "capacity": capacity - 1})


@pytest.mark.parametrize("case", TOO_LONG)
def test_the_other_advice_works_too(case: str):
    asked = TOO_LONG[case]
    message = refusal([1000, 1000], **asked)
    ways = {
        "use more lanes": {"lanes": 64},
        "raise plan.max_cp": {"max_cp": asked["lanes"]},
        "choose a larger plan.cp_size": {"cp_size": asked["lanes"]},
        "raise lanes and plan.cp_size together": {"lanes": 64, "cp_size": 64},
    }
    given = [change for way, change in ways.items() if way in message]
    assert len(given) == 1
    plan_of([1000, 1000], **{**asked, **given[0]})


@pytest.mark.parametrize("policy", ["mixed", "static", "padded"])
def test_the_longest_of_those_that_do_not_fit_is_named(policy: str):
    """On 4 lanes 1001, 1003 and 1002 tokens all need 252 a lane."""
    message = refusal([1001, 1003, 1002, 1003], lanes=4, capacity=100, policy=policy)
    assert message.startswith("sequence 1: its 1003 tokens do not fit")


def test_a_given_pack_that_is_too_big_is_named():
    asked = {"policy": "given", "packs": [[1], [0, 2]]}
    message = refusal([300, 5, 300], **asked)
    assert message.startswith("pack 1: its 600 tokens do not fit")
    plan_of([300, 5, 300], capacity=advised_capacity(message), **asked)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "min_cp above max_cp": ({"min_cp": 4, "max_cp": 2}, "plan.min_cp is 4"),
    "max_cp above the lanes": ({"max_cp": 8}, "plan.max_cp is 8, but there are only 4 lanes"),
    "no size between": ({"min_cp": 3, "max_cp": 3}, "no CP size is legal from plan.min_cp 3"),
    "align above the capacity": ({"align": 101}, "plan.align is 101, more than the capacity of "),
    "one size for mixed": ({"cp_size": 2}, "plan.cp_size works only with the policies balanced"),
    "one size for dynamic": ({"cp_size": 2, "policy": "dynamic"}, "plan.cp_size works only with"),
    "a size that is not legal": (
        {"cp_size": 3, "policy": "static"},
        "plan.cp_size is 3; legal are 1, 2, 4",
    ),
    "a size outside the limits": (
        {"cp_size": 1, "min_cp": 2, "policy": "static"},
        "plan.cp_size is 1; legal are 2, 4",
    ),
    "stages without a pipeline": (
        {"vpp": 2},
        r"parallel.vpp is 2, but without a pipeline \(parallel.pp 1\)",
    ),
    "a pipeline that runs free": ({"pp": 2, "sync": "step"}, "plan.sync=step does not work with a"),
    "experts that run free": (
        {"ep": 2, "sync": "step"},
        "plan.sync=step does not work with parallel.ep 2",
    ),
    "experts on other ranks": (
        {"ep": 16, "tp": 2},
        "parallel.ep is 16, which does not divide the 8 ranks of a pipeline stage",
    ),
    "tp above the capacity": ({"tp": 101}, "plan.align is 101, more than the capacity of 100"),
    "a bucket above the capacity": ({"buckets": [200]}, "bucket size 200: it must be a multiple"),
    "any size on many lanes": ({"cp_sizes": "any", "lanes": 65}, "plan.cp_sizes='any' works up to"),
    "a kind of sizes": ({"cp_sizes": "odd"}, "plan.cp_sizes is 'odd'; it may be 'pow2' or 'any'"),
    "a policy": ({"policy": "best"}, "plan.policy is 'best'; it must be mixed, dynamic, balanced"),
    "a sync mode": ({"sync": "never"}, "plan.sync is 'never'; it may be 'round' or 'step'"),
    "packs for another policy": ({"packs": [[0], [1]]}, "packs work only with policy 'given'"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictory_limits_are_refused(case: str):
    asked, message = CONTRADICTIONS[case]
    assert re.match(message, refusal([5, 6], **asked))


WRONG_PACKS: dict[str, tuple[Any, str]] = {
    "no packs": (None, "sequence 0 is in 0 packs; it must be in one"),
    "an empty list": ([], "sequence 0 is in 0 packs; it must be in one"),
    "a sequence is missing": ([[0]], "sequence 1 is in 0 packs; it must be in one"),
    "a sequence is in two": ([[0], [0, 1]], "sequence 0 is in 2 packs; it must be in one"),
    "a sequence is twice in one": ([[0, 1, 1]], "sequence 1 is in 2 packs; it must be"),
    "a sequence does not exist": ([[0], [1], [2]], "packs: there is no sequence 2"),
    "a sequence from the end": ([[0], [1], [-1]], "packs: there is no sequence -1"),
    "an empty pack": ([[0], [], [1]], "packs: pack 1 is empty"),
    "text": ([["a"], [0, 1]], "packs: "),
    "a fraction": ([[0.0], [1.0]], "packs: "),
    "bools": ([[False], [True]], "packs: "),
}


@pytest.mark.parametrize("case", WRONG_PACKS)
def test_wrong_packs_are_refused(case: str):
    packs, message = WRONG_PACKS[case]
    assert refusal([5, 6], policy="given", packs=packs).startswith(message)


def test_a_given_pack_above_the_cap_on_sequences_is_named():
    message = refusal([5, 6, 7], policy="given", packs=[[0], [1, 2]], max_sequences=1)
    assert message == "pack 1 has 2 sequences, but plan.max_sequences is 1"


def test_given_packs_keep_their_cp_sizes():
    plan = plan_of([5, 6, 7, 8], policy="given", packs=[(4, [0, 3]), (1, [1]), [2]])
    assert {
        pack.sequences: pack.cp_size for _, pack in plan.packs() if 2 not in pack.sequences
    } == {
        (0, 3): 4,
        (1,): 1,
    }
    plan = plan_of([50], policy="given", packs=np.array([[0]]), sync="step")
    assert [pack.cp_size for _, pack in plan.packs()] == [4], "without one the planner chooses"


def test_given_rounds_become_the_plan_as_they_are():
    rounds = [[(2, 2, [1]), (3, 1, [0])], [(0, 4, [2])]]
    plan = plan_of([5, 6, 7], policy="given", rounds=rounds)
    placed = [(n, p.first_lane, p.cp_size, p.sequences) for n, p in plan.packs()]
    assert placed == [(0, 2, 2, (1,)), (0, 3, 1, (0,)), (1, 0, 4, (2,))]
    assert plan.stats.predicted == (4 + 5) + 2


WRONG_GIVEN: dict[str, tuple[Json, str]] = {
    "a CP size that is not legal": (
        {"packs": [(1, [0]), (3, [1])]},
        "pack 1 has CP size 3; legal are 1, 2, 4",
    ),
    "a pack that is too long for its CP size": (
        {"packs": [(1, [0, 1])]},
        "pack 0: its 180 tokens do not fit at CP size 1 into 4 lanes of 100 tokens; raise "
        "plan.capacity to 180, give it a larger CP size, or shorten the sequence",
    ),
    "heads that a CP size does not divide": (
        {"rounds": [[(0, 4, [0, 1])]], "heads": 2},
        "CP size 4 is not legal; legal are 1, 2",
    ),
    "a missing sequence": (
        {"rounds": [[(0, 1, [1])]]},
        "sequence 0: it is in the plan 0 times; it must be there once",
    ),
    "a sequence twice": (
        {"rounds": [[(0, 1, [0]), (1, 1, [1])], [(2, 1, [1])]]},
        "sequence 1: it is in the plan 2 times; it must be there once",
    ),
    "lanes that are not aligned": (
        {"rounds": [[(1, 2, [0]), (0, 1, [1])]]},
        "round 0, lane 1: a pack of CP size 2 must start at a multiple of 2",
    ),
    "too many tokens": (
        {"rounds": [[(0, 2, [0, 1]), (0, 1, [2])]], "lengths": [90, 90, 20]},
        "round 0, lane 0: 112 tokens, but the capacity is 100",
    ),
    "no such sequence": (
        {"rounds": [[(0, 1, [0]), (1, 1, [1, 2])]]},
        "there is no sequence 2; sequences are numbered 0 to 1",
    ),
    "no tuples": ({"rounds": [[[0, 1]]]}, "a pack must be (first_lane, cp_size, sequences), all"),
    "both": ({"packs": [[0, 1]], "rounds": []}, "packs and rounds are both given; leave one out"),
    "another policy": ({"policy": "mixed", "rounds": []}, "packs work only with policy 'given'"),
}


@pytest.mark.parametrize("case", WRONG_GIVEN)
def test_what_is_wrong_with_a_given_plan_is_named(case: str):
    asked, message = WRONG_GIVEN[case]
    lengths = asked.get("lengths", [90, 90])
    others = {name: value for name, value in asked.items() if name != "lengths"}
    assert refusal(lengths, **{"policy": "given", **others}).startswith(message)


def test_packs_may_be_a_numpy_array():
    plan = plan_of([5, 6, 7, 8], policy="given", packs=np.array([[0, 3], [1, 2]]))
    assert sorted(pack.sequences for _, pack in plan.packs()) == [(0, 3), (1, 2)]


@pytest.mark.parametrize("policy", ["mixed", "dynamic", "balanced", "static", "padded"])
@pytest.mark.parametrize("sync", ["round", "step"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_lanes_of_one_token_hold_one_token(policy: str, sync: str, lanes: int):
    plan = plan_of([1, 1, 1], lanes=lanes, capacity=1, policy=policy, sync=sync)
    assert {pack.cp_size for _, pack in plan.packs()} == {1}
    assert plan.stats.predicted == -(-3 // lanes)


def test_the_figures_of_a_plan_by_hand():
    profile = replace(TOKENS, quadratic=0.5, pack=2.0, round=3.0)
    plan = plan_of([6, 3, 4], lanes=2, capacity=8, policy="static", profile=profile)
    # Packs (6), (3, 4) side by side: 6 + 18 + 2 and 7 + 4.5 + 8 + 2 seconds, and 3 for the round.
    stats = plan.stats
    assert stats.predicted == 26 + 3
    assert stats.efficiency == pytest.approx((13 + 0.5 * (36 + 9 + 16)) / 2 / 29)
    assert stats.imbalance == pytest.approx(1 - (29 + 24.5) / (2 * 29))
    assert (stats.rounds, stats.tokens, stats.sum_squared_lengths) == (1, 13, 61)
    assert (stats.fill, stats.padding, stats.bubble) == (13 / 16, 0, 0)
    assert stats.cp_histogram == ((1, 3),)
    assert stats.planning_seconds > 0


def test_padding_and_alignment_in_the_figures():
    # 10 tokens are padded to 12, 6 for each lane; alignment makes that 8, which all run.
    plan = plan_of([10], lanes=2, capacity=16, min_cp=2, align=8)
    assert plan.stats.predicted == plan.stats.lower_bound == 8
    assert plan.stats.padding == pytest.approx(1 - 10 / 16)
    assert plan.stats.fill == pytest.approx(12 / 32)


def test_what_buckets_add_counts_in_the_figures():
    asked = {"lanes": 2, "capacity": 1000, "profile": replace(TOKENS, quadratic=1.0), "max_cp": 1}
    plan = plan_of([4, 4], **asked, max_sequences=1, buckets=[1000])
    assert plan.stats.padding == pytest.approx(0.996)
    assert plan.stats.predicted == 1000 + 4**2 + 996**2, "the padding is a sequence of its own"
    assert plan.stats.lower_bound == 1000 + 4**2, "other sequences could have been in its place"
    assert plan.stats.efficiency == pytest.approx((4 + 4**2) / plan.stats.predicted)
    empty = plan_of([4], **asked, buckets=[500])
    assert empty.stats.padding == pytest.approx(0.996), "a lane without work runs a bucket too"
    step = plan_of([600, 10, 10], lanes=2, capacity=600, sync="step", buckets=[100], max_cp=1)
    assert step.stats.predicted == 600


def test_a_plan_for_buckets_is_faster_than_one_that_does_not_know_them():
    lengths = long_tail(1, 60, most=65536)
    asked = {"lanes": 8, "capacity": 16384, "profile": CHARGED}
    plan, other = plan_of(lengths, **asked, buckets=[8192]), plan_of(lengths, **asked)
    padded = simulate(replace(other, setting=plan.setting))
    assert padded.predicted > 1.4 * plan.stats.predicted
    assert (len(other.rounds), len(plan.rounds)) == (2, 1)


def test_alignment_limits_a_lane_s_total_not_each_sequence():
    dear = replace(TOKENS, pack=9.0)
    plan = plan_of([5, 5, 5, 1], lanes=1, capacity=17, align=8, profile=dear)
    assert [pack.tokens_per_lane for _, pack in plan.packs()] == [16]


def test_the_digest_names_the_decision():
    lengths = long_tail(0, 30, most=5000)
    asked = {"lanes": 4, "capacity": 4096, "profile": CHARGED}
    plan = make_plan(lengths, **asked)
    again = make_plan(lengths, **asked)
    assert re.fullmatch("[0-9a-f]{64}", plan.digest)
    assert again.digest == plan.digest
    assert replace(again.stats, planning_seconds=0) == replace(plan.stats, planning_seconds=0)
    others = [
        make_plan([lengths[0] + 1, *lengths[1:]], **asked),
        make_plan(lengths[::-1], **asked),
        make_plan(lengths, **asked, policy="static"),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 4


def test_the_digest_covers_all_that_decides_shapes():
    """Rounds of the same packs run as other tensors, or in another order."""
    asked = {"lanes": 4, "capacity": 4096, "policy": "static"}
    lengths = [100, 30, 30, 30]
    plans = [
        make_plan(lengths, **{**asked, **change})
        for change in (
            {},
            {"align": 8},
            {"policy": "padded"},
            {"capacity": 4095},
            {"max_cp": 2},
            {"sync": "step"},
            {"pp": 2},
            {"pp": 2, "vpp": 2},
        )
    ]
    packs = [
        [(number, pack.first_lane, pack.cp_size) for number, pack in plan.packs()] for plan in plans
    ]
    assert packs[0] == packs[1] == packs[3] == packs[4] == packs[5]
    wide = make_plan(lengths, lanes=4, capacity=100, policy="static", max_sequences=1)
    padded = make_plan(lengths, lanes=4, capacity=100, policy="padded")
    sequences = [[pack.sequences for _, pack in plan.packs()] for plan in (wide, padded)]
    assert sequences[0] == sequences[1]
    assert [pack.tokens_per_lane for _, pack in padded.packs()] == [100] * 4
    assert len({plan.digest for plan in (*plans, wide, padded)}) == len(plans) + 2
    same = make_plan(lengths, lanes=4, capacity=100, policy="static", max_sequences=1, profile=FREE)
    assert same.digest == wide.digest, "why it was decided is no part of it"


def test_a_plan_remembers_what_it_was_asked_for():
    plan = plan_of([5], lanes=6, align=4, max_sequences=3, pp=2, vpp=3, min_cp=2, max_cp=4)
    asked = {field.name: getattr(plan.setting, field.name) for field in fields(plan.setting)}
    assert asked == {
        "lanes": 6,
        "capacity": 100,
        "policy": "mixed",
        "sync": "round",
        "cp_sizes": (2, 4),
        "profile": TOKENS,
        "align": 4,
        "max_sequences": 3,
        "pp": 2,
        "vpp": 3,
        "layout": "",
        "stage_costs": None,
        "tp": 1,
        "ep": 1,
        "buckets": (),
    }
    other = plan_of([5], lanes=3, align=4, tp=6, ep=9, buckets=[60, 24]).setting
    assert (other.tp, other.ep, other.align, other.buckets) == (6, 9, 12, (24, 60, 96))
