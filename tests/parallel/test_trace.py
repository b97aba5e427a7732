"""The trace against what models issue on gloo ranks, and the checker on random plans."""

from functools import partial

from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek, hybrid
from tests.ranks.issued import check_in_flight, check_steps
from tests.ranks.spine import dense, exact
from tests.ranks.test_exactness import several_packs

from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.order import Action


def odd_packs() -> Plan:
    """CP sizes 4, 3, 2 and 1 in one round; sequences so short that halos come from several lanes."""
    first = Round((Pack(0, 4, (0, 1), 12), Pack(0, 3, (2,), 4), Pack(2, 1, (3,), 5)))
    second = Round((Pack(0, 3, (4, 5), 8), Pack(0, 2, (6,), 4)))
    third = Round((Pack(3, 1, (7,), 6),))
    lengths = [33, 3, 9, 5, 2, 13, 7, 6]
    plan = make_plan(lengths, lanes=4, capacity=64, cp_sizes="any")
    return Plan(plan.setting, plan.sequences, (first, second, third), plan.stats, "by hand")


def test_every_collective_of_a_step_is_in_the_trace() -> None:
    heads = exact(attention="heads", scan="heads", mode="zero2")
    cases = [
        (dense(4), several_packs(), exact(attention="gather", mode="none")),
        (dense(4), several_packs(), exact(attention="heads", mode="zero3", recompute="blocks")),
        (dense(4), odd_packs(), exact(mode="none", recompute="blocks")),
        (deepseek(), several_packs(), exact(mode="zero3")),
        (deepseek(), odd_packs(), exact(mode="zero2", recompute="blocks")),
        (hybrid(), several_packs(), heads),
        (hybrid(), odd_packs(), exact(attention="gather", scan="states", mode="zero3")),
        (hybrid(), odd_packs(), exact(mode="zero3", recompute="blocks")),
    ]
    compared = run_ranks(4, check_steps, cases)
    assert min(compared) > 400


def test_every_collective_with_rounds_in_flight_is_in_the_trace() -> None:
    forward, backward = partial(Action, "forward", 0), partial(Action, "backward", 0)
    order = [forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)]
    cases = [
        (hybrid(), odd_packs(), exact(mode="zero3")),
        (hybrid(), odd_packs(), exact(mode="zero3", recompute="blocks")),
        (deepseek(), odd_packs(), exact(mode="zero2")),
    ]
    assert min(run_ranks(4, check_in_flight, cases, order)) > 300
