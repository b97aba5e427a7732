from dataclasses import replace

import pytest
from tests.plan.samples import TOKENS

from longshore.plan import Pack, Plan, PlanSetting, Round, Sequence, Stats, check

SETTING = PlanSetting(
    lanes=4,
    capacity=10,
    policy="mixed",
    sync="round",
    cp_sizes=(1, 2, 4),
    profile=TOKENS,
    align=1,
    max_sequences=None,
    pp=1,
    vpp=1,
)
NO_STATS = Stats(0, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0)
# Lane 0 holds 2 tokens in the first round, lane 1 holds 2 + 3, lanes 2 and 3 hold 2 + 4.
WIDE, PAIR, ALONE = Pack(0, 4, (0,), 2), Pack(2, 2, (3,), 4), Pack(1, 1, (1,), 3)
LATER = Pack(0, 1, (2, 4), 5)
PLAN = Plan(
    setting=SETTING,
    sequences=tuple(Sequence(i, n, n) for i, n in enumerate([8, 3, 4, 6, 1])),
    rounds=(Round((WIDE, PAIR, ALONE)), Round((LATER,))),
    stats=NO_STATS,
    digest="",
)


def first_round(*packs: Pack) -> Plan:
    return replace(PLAN, rounds=(Round(packs), PLAN.rounds[1]))


def second_round(*packs: Pack) -> Plan:
    return replace(PLAN, rounds=(PLAN.rounds[0], Round(packs)))


def asked(**changes: object) -> Plan:
    return replace(PLAN, setting=replace(SETTING, **changes))


def test_a_valid_plan_passes():
    check(PLAN)


def test_limits_that_are_just_met_pass():
    check(asked(capacity=6))
    check(asked(capacity=8, align=4))
    check(asked(max_sequences=2))
    check(asked(pp=2, vpp=2))
    check(asked(pp=3))
    check(asked(align=2, tp=2, ep=8))
    check(asked(align=4, buckets=(4, 8)))


def test_an_empty_round_passes():
    check(replace(PLAN, rounds=(*PLAN.rounds, Round(()))))


BROKEN = {
    "a sequence is missing": (
        replace(PLAN, rounds=PLAN.rounds[:1]),
        "sequence 2: it is in the plan 0 times",
    ),
    "a sequence is in two packs": (
        second_round(LATER, Pack(1, 1, (3,), 6)),
        "sequence 3: it is in the plan 2 times",
    ),
    "a sequence is twice in a pack": (
        second_round(replace(LATER, sequences=(2, 4, 4), tokens_per_lane=6)),
        "sequence 4: it is in the plan 2 times",
    ),
    "a sequence does not exist": (
        second_round(LATER, Pack(1, 1, (5,), 6)),
        "round 1: there is no sequence 5",
    ),
    "a sequence is named from the end": (
        second_round(LATER, Pack(1, 1, (-1,), 1)),
        "round 1: there is no sequence -1",
    ),
    "no rounds": (replace(PLAN, sequences=(), rounds=()), "no rounds"),
    "rounds that interleaving cannot run": (
        asked(pp=3, vpp=2),
        "2 rounds, but an interleaved pipeline of 3 ranks",
    ),
    "an empty pack is listed": (
        second_round(LATER, Pack(1, 1, (), 0)),
        "round 1, lane 1: a pack has no sequences",
    ),
    "a CP size is not legal": (asked(cp_sizes=(1, 2)), "round 0, lane 0: CP size 4 is not legal"),
    "a group is not aligned": (
        first_round(WIDE, replace(PAIR, first_lane=1), ALONE),
        "round 0, lane 1: a pack of CP size 2 must start at a multiple of 2",
    ),
    "a group ends after the lanes": (
        first_round(WIDE, replace(PAIR, first_lane=4), ALONE),
        "round 0, lane 4: a pack of CP size 2 does not fit there on 4 lanes",
    ),
    "a group begins before the lanes": (
        first_round(WIDE, replace(PAIR, first_lane=-2), ALONE),
        "round 0, lane -2: a pack of CP size 2 does not fit there on 4 lanes",
    ),
    "tokens without padding": (
        first_round(WIDE, replace(PAIR, tokens_per_lane=3), ALONE),
        "round 0, lane 2: tokens_per_lane is 3, but the pack has 8",
    ),
    "padding at CP size 1": (
        first_round(WIDE, PAIR, replace(ALONE, tokens_per_lane=4)),
        "round 0, lane 1: tokens_per_lane is 4, but the pack has 3",
    ),
    "a smaller CP size comes first": (
        first_round(WIDE, ALONE, PAIR),
        "round 0: packs must be sorted by CP size",
    ),
    "a later lane comes first": (
        second_round(Pack(1, 1, (2,), 4), Pack(0, 1, (4,), 1)),
        "round 1: packs must be sorted by CP size, largest first",
    ),
    "a group has two packs": (
        second_round(Pack(0, 1, (2,), 4), Pack(0, 1, (4,), 1)),
        "round 1: two packs have the same lanes",
    ),
    "a lane holds too much": (
        asked(capacity=5),
        "round 0, lane 2: 6 tokens, but the capacity is 5",
    ),
    "a lane holds too much once aligned": (
        asked(capacity=7, align=4),
        "round 0, lane 1: 8 tokens, but the capacity is 7",
    ),
    "a lane has too many sequences": (
        asked(max_sequences=1),
        "round 0, lane 1: 2 sequences, but at most 1 are allowed",
    ),
    "tp does not divide align": (
        asked(align=2, tp=4),
        "align is 2; it must be a multiple of tp",
    ),
    "ep does not divide the ranks": (asked(ep=8), "ep is 8; it must divide lanes × tp, 4 × 1"),
    "experts of lanes that run free": (asked(ep=2, sync="step"), "'step' does not work with ep 2"),
    "a bucket is not aligned": (asked(align=2, buckets=(3, 10)), "each must be a multiple of 2"),
    "buckets fall": (asked(buckets=(8, 4, 10)), "they must rise, up to the capacity 10"),
    "buckets end below the capacity": (asked(buckets=(4, 8)), "rise, up to the capacity 10"),
    "a lane has two packs": (
        asked(policy="dynamic"),
        "round 0, lane 1: 2 packs, but policy dynamic allows one",
    ),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_is_named(promise: str):
    plan, message = BROKEN[promise]
    with pytest.raises(ValueError, match=message):
        check(plan)


def test_policy_padded_holds_every_sequence_as_the_longest():
    packs = [Pack(lane, 1, (lane,), 8) for lane in range(4)]
    plan = replace(
        PLAN,
        setting=replace(SETTING, policy="padded"),
        rounds=(Round(tuple(packs)), Round((Pack(0, 1, (4,), 8),))),
    )
    check(plan)
    with pytest.raises(ValueError, match="lane 1: tokens_per_lane is 3, but the pack has 8"):
        check(replace(plan, rounds=(Round((packs[0], ALONE, *packs[2:])), plan.rounds[1])))
