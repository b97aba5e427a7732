import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.plan.cost import CostProfile, CostTable
from longshore.plan.layout import Action, Order, make_order
from longshore.plan.pipeline import order_bound
from longshore.plan.simulate import (
    equal_columns,
    finish_times,
    lane_costs,
    make_timeline,
    simulate,
    step_time,
    table_for,
    wait_graph,
    walk,
    walk_columns,
)
from longshore.plan.types import Pack, Plan, PlanSetting, Round, Sequence, Stats

# Costs are token counts, so times can be read off by hand.
TOKENS = CostProfile(linear=1.0, quadratic=0.0, gather=(0.0, 0.0), node=8, pack=0.0, round=0.0)
SETTING = PlanSetting(
    lanes=2,
    capacity=100,
    policy="mixed",
    sync="round",
    cp_sizes=(1, 2),
    profile=TOKENS,
    align=1,
    max_sequences=None,
    pp=1,
    vpp=1,
)
NO_STATS = Stats(0, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0)
HEIGHTS = st.integers(0, 100)


@dataclass(frozen=True)
class Piped:
    """Rounds on a pipeline whose stages may differ."""

    columns: list[list[int]]
    pp: int
    vpp: int

    @property
    def order(self) -> Order:
        return make_order(len(self.columns), pp=self.pp, vpp=self.vpp)

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def duration(self, action: Action) -> int:
        return self.columns[action.round][
            action.stage + (self.stages if action.kind == "backward" else 0)
        ]

    def message(self, action: Action) -> int:
        """Of what an action waits for."""
        lower = action.stage - 1 if action.kind == "forward" else action.stage
        is_sent = 0 <= lower < self.stages - 1
        return self.columns[action.round][2 * self.stages + lower] if is_sent else 0


@st.composite
def pipelines(draw: st.DrawFn) -> Piped:
    pp, vpp = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rounds = draw(st.integers(1, 3)) * pp if vpp > 1 else draw(st.integers(1, 12))
    times = st.lists(HEIGHTS, min_size=3 * pp * vpp - 1, max_size=3 * pp * vpp - 1)
    columns = draw(st.lists(times, min_size=rounds, max_size=rounds))
    return Piped([[*column, 0] for column in columns], pp, vpp)


def slow_ends(case: Piped) -> dict[Action, int]:
    """The ends of all actions, by raising them until every rule holds."""
    ends = {action: 0 for actions in case.order for action in actions}
    changed = True
    while changed:
        changed = False
        for actions in case.order:
            now = 0
            for action in actions:
                after = Action("forward", action.stage - 1, action.round)
                if action.kind == "backward" and action.stage == case.stages - 1:
                    after = Action("forward", action.stage, action.round)
                elif action.kind == "backward":
                    after = Action("backward", action.stage + 1, action.round)
                ready = ends.get(after, 0) + case.message(action)
                now = max(now, ready) + case.duration(action)
                changed |= ends[action] != now
                ends[action] = now
    return ends


def plan_of(lengths: list[int], rounds: list[Round], setting: PlanSetting) -> Plan:
    sequences = tuple(Sequence(i, n, n) for i, n in enumerate(lengths))
    return Plan(setting, sequences, tuple(rounds), NO_STATS, "")


def test_walk_by_hand() -> None:
    walked = walk(make_order(2, pp=2, vpp=1), [1, 2], pp=2, vpp=1)
    assert [(rank, a.kind[0], a.round, *times) for rank, a, *times in walked.events()] == [
        (0, "f", 0, 0, 1),
        (0, "f", 1, 1, 3),
        (0, "b", 0, 4, 6),
        (0, "b", 1, 10, 14),
        (1, "f", 0, 1, 2),
        (1, "b", 0, 2, 4),
        (1, "f", 1, 4, 6),
        (1, "b", 1, 6, 10),
    ]
    assert walked.finish == 14


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_equal_heights_1f1b(rounds: int, pp: int) -> None:
    walked = walk(make_order(rounds, pp=pp, vpp=1), [6] * rounds, pp=pp, vpp=1)
    assert walked.finish == 3 * (rounds + pp - 1) * 6


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 2), (2, 2), (2, 3), (4, 2), (4, 4), (8, 3)])
def test_equal_heights_interleaved(groups: int, pp: int, vpp: int) -> None:
    rounds = groups * pp
    walked = walk(make_order(rounds, pp=pp, vpp=vpp), [6] * rounds, pp=pp, vpp=vpp)
    assert walked.finish == 3 * vpp * (rounds * 6) + 3 * (pp - 1) * 6


@given(pipelines())
def test_walk_is_as_early_as_the_rules_allow(case: Piped) -> None:
    walked = walk_columns(case.order, case.columns, stages=case.stages)
    slow = slow_ends(case)
    for rank, action, start, end in walked.events():
        assert end == slow[action]
        assert end - start == case.duration(action)
        assert rank == action.stage % case.pp
    assert walked.finish == max(slow.values())
    for starts, ends in zip(walked.starts, walked.ends, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


@given(pipelines(), st.randoms(use_true_random=False))
def test_finish_times_are_walks(case: Piped, random: Random) -> None:
    rounds = list(range(len(case.columns)))
    orders = [rounds, rounds[::-1], random.sample(rounds, len(rounds))]
    graph = wait_graph(len(rounds), pp=case.pp, vpp=case.vpp)
    want = [
        walk_columns(case.order, [case.columns[i] for i in order], stages=case.stages).finish
        for order in orders
    ]
    columns = np.array(case.columns, dtype=np.int64)
    assert finish_times(graph, columns, np.array(orders)).tolist() == want


@given(pipelines(), st.randoms(use_true_random=False))
def test_no_order_beats_its_bound(case: Piped, random: Random) -> None:
    columns = random.sample(case.columns, len(case.columns))
    walked = walk_columns(case.order, columns, stages=case.stages)
    bound = order_bound(np.array(case.columns, dtype=np.int64), pp=case.pp)
    assert bound <= walked.finish


def test_the_bound_of_an_order_by_hand() -> None:
    columns = np.array(equal_columns([9, 3, 3], stages=2))
    assert order_bound(columns, pp=2) == 3 * 20
    orders = np.array(list(permutations(range(3))))
    assert finish_times(wait_graph(3, pp=2, vpp=1), columns, orders).min() == 3 * 21


@pytest.mark.parametrize("vpp", [1, 2, 4])
@pytest.mark.parametrize(("pp", "groups"), [(2, 4), (4, 2), (4, 8), (8, 4)])
def test_interleaving_shrinks_the_bubble_as_theory_says(pp: int, vpp: int, groups: int) -> None:
    """Of equal rounds the bubble is (pp − 1) / (vpp · rounds) of the work."""
    rounds = groups * pp
    walked = walk(make_order(rounds, pp=pp, vpp=vpp), [12] * rounds, pp=pp, vpp=vpp)
    work = 3 * vpp * 12 * rounds
    assert Fraction(walked.finish - work, work) == Fraction(pp - 1, vpp * rounds)
    assert walked.idle_shares() == pytest.approx([1 - work / walked.finish] * pp)


def test_walk_is_exact_past_64_bits() -> None:
    huge = 2**63 + 1
    walked = walk(make_order(2, pp=2, vpp=1), [huge, huge], pp=2, vpp=1)
    assert walked.finish == 9 * huge


def test_an_order_that_cannot_run_is_refused() -> None:
    forward, backward = Action("forward", 0, 0), Action("backward", 0, 0)
    with pytest.raises(ValueError, match="rank 0 waits forever before its action 0, the backward"):
        walk(((backward, forward),), [1], pp=1, vpp=1)


def test_lane_costs_by_hand() -> None:
    profile = replace(TOKENS, gather=(0.5, 0.0), pack=7.0)
    table = CostTable(np.array([8, 3, 5]), sizes=(1, 2), profile=profile)
    round_ = Round((Pack(0, 2, (0,), 4), Pack(1, 1, (1, 2), 8)))
    rows = lane_costs([round_, Round(())], table, 3)
    # At CP size 2 each lane pays 7 + 8/2 + 0.5·8/2 = 13; the pack beside it 7 + 3 + 5 = 15.
    assert [[table.seconds(cost) for cost in row] for row in rows] == [[13, 28, 0], [0, 0, 0]]
    assert rows[0][2] == 0


def test_step_time_by_hand() -> None:
    table = CostTable(np.array([5, 3, 2, 4]), sizes=(1,), profile=TOKENS)
    rounds = [
        Round((Pack(0, 1, (0,), 5), Pack(1, 1, (1,), 3))),
        Round((Pack(0, 1, (2,), 2), Pack(1, 1, (3,), 4))),
    ]
    costs = lane_costs(rounds, table, 2)
    assert table.seconds(step_time(costs, rounds, table, "round")) == 9
    assert table.seconds(step_time(costs, rounds, table, "step")) == 7


def test_only_lanes_with_work_pay_for_a_round_in_sync_step() -> None:
    table = CostTable(np.array([5, 3]), sizes=(1,), profile=replace(TOKENS, round=10.0))
    rounds = [Round((Pack(0, 1, (0,), 5),)), Round((Pack(1, 1, (1,), 3),)), Round(())]
    costs = lane_costs(rounds, table, 2)
    assert table.seconds(step_time(costs, rounds, table, "step")) == 15
    assert table.seconds(step_time(costs, rounds, table, "round")) == 5 + 3 + 3 * 10
    assert [table.seconds(max(row) + table.round) for row in lane_costs(rounds, table, 2)] == [
        15,
        13,
        10,
    ]


@st.composite
def any_rounds(draw: st.DrawFn) -> tuple[list[int], list[Round]]:
    """Random aligned packs on 6 lanes, odd sizes too, with one sequence each."""
    groups = [(first, k) for k in range(6, 0, -1) for first in range(0, 7 - k, k)]
    lengths: list[int] = []
    rounds = []
    for chosen in draw(st.lists(st.sets(st.sampled_from(groups)), min_size=1, max_size=5)):
        packs = []
        for first, k in sorted(chosen, key=lambda group: (-group[1], group[0])):
            packs.append(Pack(first, k, (len(lengths),), 0))
            lengths.append(draw(st.integers(1, 100)))
        rounds.append(Round(tuple(packs)))
    return lengths, rounds


@given(any_rounds(), st.sampled_from([0.0, 3.0]))
def test_step_time_against_joined_sets(case: tuple[list[int], list[Round]], round_: float) -> None:
    lengths, rounds = case
    profile = replace(TOKENS, round=round_)
    table = CostTable(np.array(lengths or [1]), sizes=tuple(range(1, 7)), profile=profile)
    costs = lane_costs(rounds, table, 6)
    ready = [0] * 6
    for r, row in zip(rounds, costs, strict=True):
        joined = {lane: {lane} for pack in r.packs for lane in pack.lanes}
        for pack in r.packs:
            whole = set().union(*(joined[lane] for lane in pack.lanes))
            for lane in whole:
                joined[lane] = whole
        before = list(ready)
        for lane, whole in joined.items():
            slowest = max(row[other] for other in whole)
            ready[lane] = max(before[other] for other in whole) + slowest + table.round
    assert step_time(costs, rounds, table, "step") == max(ready)
    total = sum(max(row) + table.round for row in costs)
    assert step_time(costs, rounds, table, "round") == total


def test_timeline_by_hand() -> None:
    rounds = [
        Round((Pack(0, 2, (0,), 4), Pack(1, 1, (1,), 3))),
        Round((Pack(0, 1, (2,), 5),)),
    ]
    plan = plan_of([6, 3, 5], rounds, SETTING)
    line, timeline = simulate(plan), make_timeline(plan)
    starts = [lanes.tolist() for lanes in timeline.pack_start]
    assert (starts, timeline.pack_cost) == ([[0, 0], [4], [7]], [4, 3, 5])
    assert line.busy == (9, 7)
    assert (line.span, line.predicted, line.bubble, line.walk) == (12, 12, 0, None)
    assert line.imbalance == pytest.approx(8 / 24)
    assert line.padding == pytest.approx(2 / 16)


def test_timeline_in_sync_step() -> None:
    rounds = [Round((Pack(0, 1, (0,), 5), Pack(1, 1, (1,), 3))), Round((Pack(1, 1, (2,), 4),))]
    setting = replace(SETTING, sync="step", profile=replace(TOKENS, round=1.0))
    line = simulate(plan_of([5, 3, 4], rounds, setting))
    assert (line.span, line.busy) == (9, (6, 9))
    assert line.imbalance == pytest.approx(3 / 18)


def test_timeline_of_a_pipeline() -> None:
    rounds = [Round((Pack(0, 1, (0,), 6), Pack(1, 1, (1,), 6))), Round((Pack(0, 1, (2,), 6),))]
    line = simulate(plan_of([6, 6, 6], rounds, replace(SETTING, pp=2)))
    assert (line.span, line.predicted) == (12, 18)
    assert line.bubble == pytest.approx(6 / 18)
    assert line.imbalance == pytest.approx(6 / 24)
    assert line.walk is not None
    assert line.walk.finish * line.unit == pytest.approx(18)


def test_padding_counts_a_lane_after_alignment() -> None:
    rounds = [Round((Pack(0, 2, (0,), 4), Pack(1, 1, (1,), 3)))]
    line = simulate(plan_of([6, 3], rounds, replace(SETTING, align=5)))
    assert line.padding == pytest.approx(1 - 9 / (5 + 10))


def test_padded_costs_are_those_of_the_longest() -> None:
    setting = replace(SETTING, policy="padded")
    table = table_for(setting, [9, 2])
    assert table.tokens.tolist() == [[9, 6], [9, 6]]
    assert table.seconds(int(table.cost[1, 0])) == 9
    assert table_for(SETTING, [9, 2]).tokens.tolist() == [[9, 6], [2, 2]]
    rounds = [Round((Pack(0, 1, (0,), 9), Pack(1, 1, (1,), 9)))]
    line = simulate(plan_of([9, 2], rounds, setting))
    assert (line.predicted, line.imbalance) == (9, 0)
    assert line.padding == pytest.approx(7 / 18)


@given(any_rounds(), st.sampled_from(["round", "step"]), st.sampled_from([1, 2]))
def test_timeline_agrees_with_step_time(
    case: tuple[list[int], list[Round]], sync: str, vpp: int
) -> None:
    lengths, rounds = case
    if not lengths:
        return
    setting = replace(SETTING, lanes=6, cp_sizes=tuple(range(1, 7)), sync=sync, vpp=vpp)
    line = simulate(plan_of(lengths, rounds, setting))
    table = table_for(setting, lengths)
    quanta = step_time(lane_costs(rounds, table, 6), rounds, table, sync)
    assert line.predicted == line.span == table.seconds(quanta)
    assert 0 <= line.imbalance <= 1
    assert math.isclose(sum(line.busy), 6 * line.span * (1 - line.imbalance), rel_tol=1e-9)
