"""Stages that differ: what a plan predicts for them, computed again apart from the planner."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.evaluator import lanes_of, padded, sequence_cost
from tests.plan.samples import CHARGED, TOKENS, examples, long_tail

from longshore.plan import Plan, Round, check, make_plan
from longshore.plan.cost import StageCosts, equal_stages, share_out
from longshore.plan.layout import Action, make_order, parse_layout
from longshore.plan.simulate import pipeline_walk

PAIRS = st.tuples(st.integers(1, 40), st.integers(1, 80))


@st.composite
def stage_costs(draw: st.DrawFn, pp: int, vpp: int) -> StageCosts:
    stages = pp * vpp
    linear, quadratic = (draw(st.lists(PAIRS, min_size=stages, max_size=stages)) for _ in range(2))
    streams = [*accumulate(draw(st.lists(st.integers(0, 1), min_size=stages, max_size=stages)))]
    return share_out(linear=linear, quadratic=quadratic, streams=[1 + n for n in streams], pp=pp)


def lane_rows(plan: Plan, round_: Round) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Linear seconds, quadratic and gathered seconds, and tokens of each lane."""
    profile = plan.setting.profile
    linear, rest, tokens = np.zeros((3, plan.setting.lanes))
    for pack in round_.packs:
        lanes = slice(pack.first_lane, lanes_of(pack).stop)
        linear[lanes] += profile.pack
        tokens[lanes] += pack.tokens_per_lane
        for place in pack.sequences:
            length, size = plan.sequences[place].length, pack.cp_size
            share = profile.linear * padded(length, size) / size
            linear[lanes] += share
            rest[lanes] += sequence_cost(profile, length, size) - share
    return linear + profile.round, rest, tokens


def predicted(plan: Plan) -> float:
    """The finish of the plan's pipeline in floating point."""
    setting, costs = plan.setting, plan.setting.shares
    stages, rows = setting.pp * setting.vpp, [lane_rows(plan, r) for r in plan.rounds]

    def seconds(action: Action) -> float:
        linear, rest, _ = rows[action.round]
        ahead = action.kind == "forward"
        a = (costs.forward_linear if ahead else costs.backward_linear)[action.stage]
        b = (costs.forward_quadratic if ahead else costs.backward_quadratic)[action.stage]
        return float((a * linear + b * rest).max()) / costs.whole

    def ready(action: Action, ends: dict[Action, float]) -> float | None:
        step = -1 if action.kind == "forward" else 1
        before = Action(action.kind, action.stage + step, action.round)
        if action.kind == "backward" and action.stage == stages - 1:
            return ends.get(Action("forward", action.stage, action.round))
        if not 0 <= before.stage < stages:
            return 0.0
        sender = min(before.stage, action.stage)
        message = setting.profile.message * costs.streams[sender] * rows[action.round][2].max()
        return ends[before] + message if before in ends else None

    queues = [list(actions) for actions in make_order(len(rows), pp=setting.pp, vpp=setting.vpp)]
    now, ends = [0.0] * setting.pp, dict[Action, float]()
    while any(queues):
        for rank, queue in enumerate(queues):
            if queue and (start := ready(queue[0], ends)) is not None:
                action = queue.pop(0)
                now[rank] = ends[action] = max(now[rank], start) + seconds(action)
    return max(now)


@pytest.mark.slow
@settings(max_examples=examples(15, fuzz=2_000), deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(1, 2), st.integers(1, 80))
def test_what_a_plan_predicts_for_stages_that_differ(
    data: st.DataObject, pp: int, vpp: int, count: int
):
    costs = data.draw(stage_costs(pp, vpp))
    profile = replace(CHARGED, message=data.draw(st.sampled_from([0.0, 0.1])), round=10.0)
    lengths = long_tail(count, count, most=3000)
    plan = make_plan(
        lengths, lanes=4, capacity=1024, profile=profile, pp=pp, vpp=vpp, stage_costs=costs
    )
    check(plan)
    assert plan.stats.predicted == pytest.approx(predicted(plan), rel=1e-9)
    assert plan.stats.lower_bound <= plan.stats.predicted * (1 + 1e-9)
    assert 0 <= plan.stats.bubble < 1


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_parts_add_up(pp: int, vpp: int, data: st.DataObject):
    costs = data.draw(stage_costs(pp, vpp))
    assert sum(costs.of_rank(rank, pp)[0] for rank in range(pp)) == pp * costs.whole
    assert sum(costs.of_rank(rank, pp)[1] for rank in range(pp)) == pp * costs.whole


def test_equal_parts_are_what_is_meant_by_none():
    asked = {"lanes": 2, "capacity": 100, "profile": CHARGED, "pp": 3}
    one, other = (
        make_plan([90, 50, 70, 20, 10], **asked, stage_costs=costs)
        for costs in (None, equal_stages(3, 1))
    )
    assert (one.rounds, one.stats.predicted) == (other.rounds, other.stats.predicted)


def test_one_round_by_hand():
    """Stages of 1 and 2 parts, backward three times the forward; 12 tokens, a message each."""
    costs = share_out(linear=[(1, 3), (2, 6)], quadratic=[(0, 0), (0, 0)], streams=[1, 1], pp=2)
    profile = replace(TOKENS, message=0.25)
    plan = make_plan([12], lanes=1, capacity=12, profile=profile, pp=2, stage_costs=costs)
    # The whole model takes 2 · 12, one stage 8 of it and the other 16; a message takes 3 each way.
    assert plan.stats.predicted == pytest.approx(8 + 16 + 2 * 3, rel=1e-5)


def test_every_action_takes_time():
    asked = {"lanes": 1, "capacity": 10, "profile": TOKENS, "pp": 2, "vpp": 2}
    plan = make_plan([10], **asked)
    assert any(not round_.packs for round_ in plan.rounds)
    assert all(event.end > event.start for event in pipeline_walk(plan).events())


@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_of_many_equal_rounds_takes_its_share_and_fill_and_drain(pp: int):
    """The profile is of the whole model on one GPU, so a rank's is a part of it."""
    asked = {"lanes": 2, "capacity": 10, "policy": "static"}
    whole = make_plan([10] * 200, **asked, profile=TOKENS)
    assert whole.stats.predicted == 1000
    piped = make_plan([10] * 200, **asked, profile=TOKENS.on_ranks(tp=1, pp=pp), pp=pp)
    assert piped.stats.predicted == pytest.approx((1000 + 10 * (pp - 1)) / pp)
    split = make_plan([10] * 200, **asked, profile=TOKENS.on_ranks(tp=2, pp=pp), pp=pp)
    assert split.stats.predicted == pytest.approx(piped.stats.predicted / 2)
    assert piped.stats.efficiency == pytest.approx(100 / (100 + pp - 1))


def test_stages_of_another_pipeline_are_refused():
    asked = {"lanes": 1, "capacity": 10, "pp": 2}
    with pytest.raises(ValueError, match="the stage costs are of 3 stages"):
        make_plan([5], **asked, stage_costs=equal_stages(3, 1))
    with pytest.raises(ValueError, match=r"layout has 4 ranks of 1 stages, but parallel\.pp is 2"):
        make_plan([5], **asked, layout=parse_layout("Et|t|t|L", pp=4, layers=3))


def test_the_digest_covers_what_a_pipeline_runs_by():
    """By layout and costs ranks order their messages: a difference would be a hang."""
    asked = {"lanes": 2, "capacity": 16, "pp": 2, "policy": "static", "profile": TOKENS}
    unequal = share_out(linear=[(1, 2), (1, 3)], quadratic=[(1, 2)] * 2, streams=[1, 1], pp=2)
    plans = [
        make_plan([16, 16], **{**asked, **change})
        for change in (
            {},
            {"layout": parse_layout("Et|tL", pp=2, layers=2)},
            {"layout": parse_layout("Ett|L", pp=2, layers=2)},
            {"stage_costs": unequal},
            {"profile": replace(TOKENS, message=1.0)},
            {"profile": replace(TOKENS, pack=1.0)},
            {"policy": "padded"},
            {"align": 8},
        )
    ]
    assert all(plan.rounds == plans[0].rounds for plan in plans)
    assert len({plan.digest for plan in plans}) == len(plans)
    again = make_plan([16, 16], **asked, layout=parse_layout("Et|tL", pp=2, layers=2))
    assert again.digest == plans[1].digest
    assert again.setting.layout == "Et|tL"


def test_without_a_pipeline_neither_layout_nor_costs_matter():
    asked = {"lanes": 2, "capacity": 16, "policy": "static"}
    one, other = (
        make_plan([16, 9], **asked, profile=TOKENS, layout=layout)
        for layout in (None, parse_layout("EttL", pp=1, layers=2))
    )
    assert one.digest == other.digest == make_plan([16, 9], **asked, profile=CHARGED).digest
