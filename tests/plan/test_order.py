from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.plan.layout import Action, Order, make_order

PIPELINES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))


def legal(sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """(rounds, pp, vpp) with a number of rounds that the schedule accepts."""
    pp, vpp, groups = sizes
    return (groups * pp if vpp > 1 else groups), pp, vpp


def spell(order: Order) -> list[str]:
    return [" ".join(f"{a.kind[0].upper()}{a.round}@{a.stage}" for a in rank) for rank in order]


def test_one_forward_one_backward_by_hand() -> None:
    assert spell(make_order(3, pp=2, vpp=1)) == [
        "F0@0 F1@0 B0@0 F2@0 B1@0 B2@0",
        "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1",
    ]


def test_fewer_rounds_than_ranks() -> None:
    assert spell(make_order(1, pp=3, vpp=1)) == ["F0@0 B0@0", "F0@1 B0@1", "F0@2 B0@2"]


def test_interleaved_by_hand() -> None:
    assert spell(make_order(4, pp=2, vpp=2)) == [
        "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0",
        "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1",
    ]


@given(PIPELINES)
def test_every_action_once_on_its_rank(sizes: tuple[int, int, int]) -> None:
    rounds, pp, vpp = legal(sizes)
    order = make_order(rounds, pp=pp, vpp=vpp)
    assert len(order) == pp
    for rank, actions in enumerate(order):
        want = {
            Action(kind, stage, round_)
            for kind in ("forward", "backward")
            for stage in range(rank, pp * vpp, pp)
            for round_ in range(rounds)
        }
        assert Counter(actions) == Counter(want)


@given(PIPELINES)
def test_runs_to_the_end(sizes: tuple[int, int, int]) -> None:
    """Walked in any way that respects the dependencies, nothing waits for ever."""
    rounds, pp, vpp = legal(sizes)
    order = make_order(rounds, pp=pp, vpp=vpp)
    done: set[Action] = set()
    cursors = [0] * pp

    def ready(action: Action) -> bool:
        if action.kind == "forward":
            return action.stage == 0 or Action("forward", action.stage - 1, action.round) in done
        if action.stage == pp * vpp - 1:
            return Action("forward", action.stage, action.round) in done
        return Action("backward", action.stage + 1, action.round) in done

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            if cursors[rank] < len(actions) and ready(actions[cursors[rank]]):
                done.add(actions[cursors[rank]])
                cursors[rank] += 1
                moved = True
    assert cursors == [2 * rounds * vpp] * pp


@given(PIPELINES)
def test_memory_in_flight(sizes: tuple[int, int, int]) -> None:
    rounds, pp, vpp = legal(sizes)
    for rank, actions in enumerate(make_order(rounds, pp=pp, vpp=vpp)):
        held = highest = 0
        for action in actions:
            held += 1 if action.kind == "forward" else -1
            highest = max(highest, held)
        ahead = pp - rank - 1
        most = ahead + 1 if vpp == 1 else 2 * ahead + (vpp - 1) * pp + 1
        assert highest == min(most, rounds * vpp)


@pytest.mark.parametrize("sizes", [(0, 2, 1), (2, 0, 1), (2, 2, 0), (-4, 2, 2)])
def test_refuses_less_than_one(sizes: tuple[int, int, int]) -> None:
    rounds, pp, vpp = sizes
    with pytest.raises(ValueError, match="at least 1"):
        make_order(rounds, pp=pp, vpp=vpp)


def test_refuses_a_broken_multiple() -> None:
    with pytest.raises(ValueError, match=r"5 rounds .* 4 pipeline ranks; add 3 empty rounds"):
        make_order(5, pp=4, vpp=2)
