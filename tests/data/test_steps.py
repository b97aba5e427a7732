"""Plans of a planner of one's own are checked before anything is read or sent."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.broken_plans import BROKEN
from tests.data.plans import made_plans

from longshore.data.source import BatchSize, MemorySource, Place, TokenizedSample
from longshore.data.steps import IndexedSteps, Packing
from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.check import check_step

LENGTHS = [9, 3, 4, 2, 1, 6]


def source_of(lengths):
    return MemorySource(
        TokenizedSample(0, np.arange(n, dtype=np.int32), np.ones(n, dtype=np.bool_))
        for n in lengths
    )


def steps_of(planner, *, shuffle=False):
    batch = BatchSize("sequences", 3)
    return IndexedSteps(source_of(LENGTHS), planner=planner, batch=batch, seed=0, shuffle=shuffle)


def plan_of_one_lane(sequences) -> Plan:
    return make_plan(sequences, lanes=1, capacity=16, policy="static")


def test_a_valid_plan_of_any_planner_runs():
    def by_hand(sequences):
        plan = plan_of_one_lane(sequences)
        rounds = [Round((Pack(0, 1, (i,), s.length),)) for i, s in enumerate(sequences)]
        return replace(plan, rounds=tuple(rounds), digest="")

    step = next(steps_of(by_hand).from_place(Place(), lambda: False))
    assert [batch.ctx.tokens for batch in step.batches] == LENGTHS[:3]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_refused_at_run_time(name: str):
    change, message = BROKEN[name]
    steps = steps_of(lambda sequences: change(plan_of_one_lane(sequences)))
    with pytest.raises(ValueError, match=message):
        next(steps.from_place(Place(), lambda: False))


@pytest.mark.property
@given(made_plans(), st.sampled_from(sorted(BROKEN)))
def test_whatever_is_broken_in_whatever_plan(plan: Plan, name: str):
    check_step(plan, plan.sequences, lanes=plan.setting.lanes)
    broken = BROKEN[name][0](plan)
    with pytest.raises(ValueError):  # noqa: PT011 the first promise that is broken may be another
        check_step(broken, plan.sequences, lanes=plan.setting.lanes)


def test_a_checkpoint_of_another_order_is_refused():
    steps = steps_of(plan_of_one_lane, shuffle=True)
    steps.check_can_resume(steps.describe())
    before = {name: value for name, value in steps.describe().items() if name != "order"}
    with pytest.raises(ValueError, match="had order None, and now it is 'splitmix64'"):
        steps.check_can_resume(before)
    unshuffled = steps_of(plan_of_one_lane)
    unshuffled.check_can_resume({**before, "shuffle": False})


@pytest.mark.property
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=6))
def test_counts_are_what_the_micro_batches_hold(masks):
    samples = (TokenizedSample(0, np.zeros(len(m), dtype=np.int32), np.array(m)) for m in masks)
    steps = IndexedSteps(
        MemorySource(samples),
        planner=partial(make_plan, lanes=1, capacity=8),
        batch=BatchSize("sequences", len(masks)),
        seed=0,
        packing=Packing(depths=3),
    )
    step = next(steps.from_place(Place(), lambda: False))
    counts = step.batches[0].counts
    held = [[int(b.targets.loss_mask.sum()), int(b.ctx.is_real.sum())] for b in step.batches]
    assert [sum(column) for column in zip(*held, strict=True)] == [counts.main, counts.tokens]
    for depth in (1, 2, 3):
        labels = sum(int(b.mtp[depth - 1].targets.loss_mask.sum()) for b in step.batches)
        seen = sum(int(b.ctx.ahead(depth).is_real.sum()) for b in step.batches)
        assert (labels, seen) == (counts.mtp[depth - 1], counts.tokens_at(depth))
