"""What graphs serve, against counts by hand and against the boundaries that kernels see."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.data.pack import lane_context
from longshore.plan import make_plan
from longshore.plan.graph_use import (
    BUCKETS,
    GraphSetting,
    MicroBatchSizes,
    as_graphed,
    choose_cap,
    graph_way,
    steady_cap,
)
from longshore.plan.shapes import lane_packs, lane_tokens, make_buckets

CAPACITY = 64


@st.composite
def plans(draw):
    lanes = draw(st.sampled_from([1, 2, 3, 4]))
    align = draw(st.sampled_from([1, 8]))
    count = draw(st.sampled_from([0, 1, 3]))
    buckets = make_buckets(CAPACITY, align=align, count=count) if count else ()
    lengths = draw(st.lists(st.integers(1, CAPACITY * lanes // 2), min_size=1, max_size=12))
    policy = draw(st.sampled_from(["mixed", "balanced"]))
    options = {"lanes": lanes, "capacity": CAPACITY, "align": align, "buckets": buckets}
    return make_plan(lengths, policy=policy, **options)


def sequences_with_padding(plan, number, lane):
    """Sequences of a lane in round `number` as kernels see them: its padding is one more."""
    packs = lane_packs(plan, number, lane)
    padded = lane_tokens(plan, number, lane) > sum(pack.tokens_per_lane for pack in packs)
    return sum(len(pack.sequences) for pack in packs) + padded


def micro_batches(plan):
    return [
        (number, lane) for number in range(len(plan.rounds)) for lane in range(plan.setting.lanes)
    ]


@settings(max_examples=25, deadline=None)
@given(plans())
def test_sequences_are_those_of_the_boundaries(plan):
    for number, lane in micro_batches(plan):
        ctx = lane_context(plan, number, lane)
        spans = sum(len(pack.local) for pack in ctx.packs)
        assert sequences_with_padding(plan, number, lane) == spans


@settings(max_examples=25, deadline=None)
@given(st.lists(plans(), min_size=1, max_size=3), st.floats(0.01, 1))
def test_the_cap_is_the_least_that_covers(steps, coverage):
    alone = []
    for plan in steps:
        for number, lane in micro_batches(plan):
            packs = lane_packs(plan, number, lane)
            if [pack.cp_size for pack in packs] == [1]:
                alone.append(sequences_with_padding(plan, number, lane))
    cap = choose_cap(steps, coverage)
    sizes = MicroBatchSizes.of(steps)
    assert sorted(sizes.alone.tolist()) == sorted(alone)
    covers = [c for c in range(1, 20) if sum(n <= c for n in alone) >= coverage * len(alone) - 1e-9]
    assert cap == min(covers)
    if alone:
        served = [n for n in alone if n <= cap]
        assert sizes.covered(cap) == len(served) / len(alone)
        assert math.isclose(
            sizes.empty_share(cap), sum(cap - n for n in served) / len(served) / cap, abs_tol=1e-12
        )
    busy = sum(bool(lane_packs(plan, n, lane)) for plan in steps for n, lane in micro_batches(plan))
    assert sizes.others == busy - len(alone)


@pytest.mark.parametrize(
    ("sizes", "sequences", "setting", "way"),
    [
        ((1,), 4, GraphSetting(4, True), "whole"),
        ((), 1, GraphSetting(4, True), "whole"),
        ((1,), 5, GraphSetting(4, True), "halves"),
        ((1,), 5, GraphSetting(4, False), "eager"),
        ((2,), 1, GraphSetting(4, True), "halves"),
        ((2, 1), 2, GraphSetting(4, True), "halves"),
        ((1, 1), 2, GraphSetting(4, True), "halves"),
        ((2,), 1, GraphSetting(4, False), "eager"),
        ((1,), 1, None, "eager"),
    ],
)
def test_the_way_of_a_micro_batch(sizes, sequences, setting, way):
    assert graph_way(sizes, sequences, setting) == way


def test_a_cap_of_each_quarter():
    """The cap of all four steps together is 2; in the quarter of the third step 4, and a spare."""

    def step(*lengths):
        return make_plan(lengths, lanes=1, capacity=8, max_cp=1)

    steps = [step(4, 4), step(4, 4), step(2, 2, 2, 2), step(4, 4)]
    assert choose_cap(steps, 0.75) == 2
    assert steady_cap(steps, 0.75) == 5
    assert steady_cap(steps[:1], 0.75) == 3


def test_plans_without_such_micro_batches():
    plan = make_plan([16], lanes=2, capacity=8)
    assert MicroBatchSizes.of([plan]).others == 2
    assert choose_cap([plan], 0.95) == 1
    assert MicroBatchSizes.of([plan]).covered(1) == 1
    assert MicroBatchSizes.of([plan]).empty_share(1) == 0


@pytest.mark.parametrize("coverage", [0.0, -1.0, 1.5, math.nan])
def test_a_wrong_coverage_is_refused(coverage):
    with pytest.raises(ValueError, match=r"^graph.coverage is .* above 0 and at most 1$"):
        choose_cap([], coverage)


def test_a_run_with_graphs_has_buckets():
    plan = make_plan([5, 7, 9], lanes=1, capacity=64)
    assert as_graphed(plan).setting.buckets == make_buckets(64, count=BUCKETS)
    own = make_plan([5, 7, 9], lanes=1, capacity=64, buckets=(32, 64))
    assert as_graphed(own) is own
    few = replace(plan, setting=replace(plan.setting, align=8))
    assert as_graphed(few) is few
