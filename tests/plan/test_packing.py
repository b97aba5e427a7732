from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.samples import CHARGED, TOKENS

from longshore.plan.cost import CostProfile, CostTable
from longshore.plan.packing import (
    Aim,
    BlockItems,
    Filled,
    PackingLimits,
    Problem,
    choose_levels,
    fill,
)

LIMITS = PackingLimits(lanes=2, capacity=100, lane_tokens=100, max_items=99, sole=False)


def problem_of(
    lengths: list[int],
    *,
    sizes: tuple[int, ...] = (1, 2),
    profile: CostProfile = TOKENS,
    **limits: object,
) -> Problem:
    table = CostTable(np.array(lengths, dtype=np.int64), sizes=sizes, profile=profile)
    return Problem(table, replace(LIMITS, **limits))


def aim_of(problem: Problem, seconds: float, *, tolerance: float = 0.0, tight: bool = True) -> Aim:
    return Aim(int(seconds * problem.table.scale), tolerance, tight=tight)


def filled(problem: Problem, aim: Aim, *, rounds: int = 1) -> Filled:
    return fill(problem, np.arange(len(problem.cost)), rounds=rounds, aim=aim)


def packs_of(result: Filled) -> list[BlockItems]:
    return list(result.blocks(0))


def places(result: Filled) -> set[tuple[int, int, int, tuple[int, ...]]]:
    return {(p.round, p.first_lane, p.cp_size, tuple(p.items)) for p in packs_of(result)}


def seconds(problem: Problem, result: Filled) -> list[float]:
    return [height / problem.table.scale for height in result.heights]


def levels(problem: Problem, aim: Aim) -> list[int]:
    chosen = choose_levels(problem, np.arange(len(problem.cost)), aim)
    return [problem.sizes[level] for level in chosen]


# The example of packing.py.
def test_short_items_fill_what_a_long_one_leaves():
    problem = problem_of([8, 3, 3])
    result = filled(problem, aim_of(problem, 7))
    assert {(p.cp_size, tuple(p.items)) for p in packs_of(result)} == {
        (2, (0,)),
        (1, (1,)),
        (1, (2,)),
    }
    assert {p.first_lane for p in packs_of(result) if p.cp_size == 1} == {0, 1}
    assert seconds(problem, result) == [7]
    assert result.left.tolist() == []


def test_an_item_gets_the_smallest_size_that_meets_the_height():
    problem = problem_of([16, 8, 4], sizes=(1, 2, 4), lanes=4)
    assert levels(problem, aim_of(problem, 16)) == [1, 1, 1]
    assert levels(problem, aim_of(problem, 8)) == [2, 1, 1]
    assert levels(problem, aim_of(problem, 4)) == [4, 2, 1]


def test_an_item_that_is_always_too_tall_gets_the_size_that_costs_a_lane_least():
    problem = problem_of([16], sizes=(1, 2, 4), lanes=4)
    assert levels(problem, aim_of(problem, 1)) == [4]
    dear = problem_of([16], sizes=(1, 2, 4), lanes=4, profile=replace(TOKENS, gather=(1.5, 1.5)))
    assert levels(dear, aim_of(dear, 1)) == [1]


def test_the_cost_of_the_pack_counts_against_the_height():
    problem = problem_of([8], profile=replace(TOKENS, pack=2.0))
    assert levels(problem, aim_of(problem, 10)) == [1]
    assert levels(problem, aim_of(problem, 9)) == [2]


def test_tolerance_allows_a_larger_size_that_takes_little_more_area():
    problem = problem_of([100], lanes=2, profile=replace(TOKENS, gather=(0.05, 0.05)))
    assert levels(problem, aim_of(problem, 100)) == [1]
    assert levels(problem, aim_of(problem, 100, tolerance=0.04)) == [1]
    assert levels(problem, aim_of(problem, 100, tolerance=0.06)) == [2]


def test_a_size_at_which_an_item_does_not_fit_is_not_chosen():
    problem = problem_of([120, 90], capacity=100)
    assert levels(problem, aim_of(problem, 1000)) == [2, 1]


def test_tight_puts_an_item_where_it_leaves_the_least_room():
    problem = problem_of([6, 4, 3], sizes=(1,), lanes=2)
    result = filled(problem, aim_of(problem, 9))
    assert {tuple(placed.items) for placed in packs_of(result)} == {(0, 2), (1,)}
    assert seconds(problem, result) == [9]


def test_loose_puts_an_item_where_the_load_is_least():
    problem = problem_of([6, 4, 3], sizes=(1,), lanes=2)
    result = filled(problem, aim_of(problem, 9, tight=False))
    assert places(result) == {(0, 0, 1, (0,)), (0, 1, 1, (1, 2))}
    assert seconds(problem, result) == [7]


@pytest.mark.parametrize("tight", [True, False])
def test_what_finds_no_tokens_is_left(tight: bool):
    problem = problem_of([6, 5, 4], sizes=(1,), lane_tokens=9)
    result = filled(problem, aim_of(problem, 100, tight=tight))
    assert sorted(i for p in packs_of(result) for i in p.items) == [0, 1, 2]
    problem = problem_of([6, 5, 5], sizes=(1,), lane_tokens=9)
    result = filled(problem, aim_of(problem, 100, tight=tight))
    assert result.left.tolist() == [2]


def test_what_is_above_the_height_is_left_where_fitting_is_tight():
    problem = problem_of([6, 5, 5], sizes=(1,))
    assert filled(problem, aim_of(problem, 10)).left.tolist() == []
    assert filled(problem, aim_of(problem, 9)).left.tolist() == [2]


@pytest.mark.parametrize("tight", [True, False])
def test_a_sole_pack_shares_its_lanes_with_no_other(tight: bool):
    shared = problem_of([80, 10, 10])
    aim = aim_of(shared, 60, tight=tight)
    assert len(filled(shared, aim).left) == 0
    sole = problem_of([80, 10, 10], sole=True)
    assert filled(sole, aim).left.tolist() == [1, 2]


@pytest.mark.parametrize("tight", [True, False])
def test_no_lane_takes_more_items_than_it_may(tight: bool):
    problem = problem_of([3, 3, 3, 3, 3], sizes=(1,), max_items=2)
    result = filled(problem, aim_of(problem, 100, tight=tight))
    assert sorted(len(p.items) for p in packs_of(result)) == [2, 2]
    assert result.left.tolist() == [4]


def test_lanes_beyond_the_last_whole_group_take_smaller_ones():
    problem = problem_of([40, 40, 10, 10], sizes=(1, 2, 4, 6), lanes=6, capacity=100)
    result = filled(problem, aim_of(problem, 10), rounds=2)
    wide = {(p.round, p.first_lane, p.cp_size) for p in packs_of(result) if p.cp_size == 4}
    assert wide == {(0, 0, 4), (1, 0, 4)}
    narrow = {p.first_lane for p in packs_of(result) if p.cp_size == 1}
    assert narrow <= {4, 5}
    assert result.left.tolist() == []


@st.composite
def fillings(draw: st.DrawFn) -> tuple[Problem, Aim, int]:
    lengths = sorted(draw(st.lists(st.integers(1, 100), min_size=1, max_size=25)), reverse=True)
    lanes, sizes = draw(st.sampled_from([(4, (1, 2, 4)), (6, (1, 2, 4, 6)), (6, (1, 2, 3, 4, 5))]))
    problem = problem_of(
        lengths,
        sizes=sizes,
        lanes=lanes,
        profile=draw(st.sampled_from([TOKENS, replace(CHARGED, pack=5.0, node=2)])),
        lane_tokens=draw(st.integers(100, 200)),
        max_items=draw(st.integers(1, 6)),
        sole=draw(st.booleans()),
    )
    tolerance = draw(st.sampled_from([0.0, 0.08]))
    aim = aim_of(problem, draw(st.integers(1, 150)), tolerance=tolerance, tight=draw(st.booleans()))
    return problem, aim, draw(st.integers(1, 3))


def lane_totals(problem: Problem, result: Filled, rounds: int) -> np.ndarray:
    """Cost, tokens, items and packs of each lane of each round, counted again."""
    totals = np.zeros((4, rounds, problem.lanes), dtype=np.int64)
    for placed in packs_of(result):
        level = problem.sizes.index(placed.cp_size)
        cost = problem.table.cost[placed.items, level].sum() + problem.pack
        tokens = problem.table.tokens[placed.items, level].sum()
        lanes = slice(placed.first_lane, placed.first_lane + placed.cp_size)
        assert placed.first_lane % placed.cp_size == 0
        assert placed.first_lane + placed.cp_size <= problem.lanes
        column = np.array([cost, tokens, len(placed.items), 1])
        totals[:, placed.round, lanes] += column[:, None]
    return totals


@pytest.mark.property
@given(fillings())
def test_a_filling_keeps_every_limit(filling: tuple[Problem, Aim, int]):
    problem, aim, rounds = filling
    result = filled(problem, aim, rounds=rounds)
    cost, tokens, items, packs = lane_totals(problem, result, rounds)
    assert cost.max(axis=1).tolist() == result.heights
    assert tokens.max() <= problem.capacity
    assert items.max() <= problem.max_items
    assert packs.max() <= (1 if problem.sole else len(problem.sizes))
    if aim.tight:
        assert cost.max() <= aim.height
    placed = [i for pack in packs_of(result) for i in pack.items]
    assert sorted([*placed, *result.left.tolist()]) == list(range(len(problem.cost)))
    groups = [(p.round, p.first_lane, p.cp_size) for p in packs_of(result)]
    assert len(set(groups)) == len(groups)
