"""The order in which lanes begin the collectives of attention: simulated, it cannot deadlock."""

from collections import deque
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.model.interface import backward_steps, forward_steps


class Op(NamedTuple):
    """One collective: first_lane and cp_size name the group, number the pack."""

    name: str
    first_lane: int
    cp_size: int
    number: int


class Shared(NamedTuple):
    cp_size: int
    first_lane: int
    number: int


def issued(packs: list[Shared], heads: frozenset[int]) -> list[Op]:
    """What a lane issues in one layer, forward and backward; heads: CP sizes split over heads."""
    by_heads = [pack for pack in packs if pack.cp_size in heads]
    rest = [pack for pack in packs if pack.cp_size not in heads]
    sizes = [pack.cp_size for pack in rest]

    def begun(which: str, steps) -> list[Op]:
        return [op(f"{which} {action}", rest[pack]) for action, pack in steps if action != "attend"]

    def op(name: str, pack: Shared) -> Op:
        return Op(name, pack.first_lane, pack.cp_size, pack.number)

    forward = [op(f"forward {way}", p) for p in by_heads for way in ("to", "from")]
    forward += begun("forward", forward_steps(sizes))
    backward = begun("backward", backward_steps(sizes))
    backward += [op(f"backward {way}", p) for p in reversed(by_heads) for way in ("from", "to")]
    return forward + backward


def run_blocking(lanes: list[list[Op]]) -> list[int]:
    """Each lane blocks until all lanes of the group are at the same collective. Who is stuck."""
    queues = [deque(ops) for ops in lanes]
    moved = True
    while moved:
        moved = False
        for queue in queues:
            if not queue:
                continue
            op = queue[0]
            group = queues[op.first_lane : op.first_lane + op.cp_size]
            if all(other and other[0] == op for other in group):
                moved = True
                for other in group:
                    other.popleft()
    return [lane for lane, queue in enumerate(queues) if queue]


def same_order_for_every_two(lanes: list[list[Op]]) -> bool:
    """What NCCL wants: any two ranks begin the collectives that both take part in alike."""
    for a, first in enumerate(lanes):
        for second in lanes[a + 1 :]:
            common = set(first) & set(second)
            if [op for op in first if op in common] != [op for op in second if op in common]:
                return False
    return True


@st.composite
def rounds(draw, sizes=(1, 2, 4, 8, 16), lanes=16):
    """Every lane's packs: any aligned groups, some twice, and CP size 1 on some lanes."""
    packs = [
        Shared(size, first, 0)
        for size in sizes
        for first in range(0, lanes - size + 1, size)
        if draw(st.booleans())
    ]
    packs += [pack._replace(number=1) for pack in packs if draw(st.integers(0, 7)) == 0]
    packs.sort(key=lambda pack: (-pack.cp_size, pack.first_lane, pack.number))
    return [[p for p in packs if 0 <= lane - p.first_lane < p.cp_size] for lane in range(lanes)]


heads_sizes = st.frozensets(st.sampled_from([2, 3, 4, 5, 8, 16]))


@given(rounds(), heads_sizes)
def test_no_deadlock_with_powers_of_two(lanes: list[list[Shared]], heads: frozenset[int]) -> None:
    ops = [issued(packs, heads) for packs in lanes]
    assert same_order_for_every_two(ops)
    assert run_blocking(ops) == []


@given(rounds(sizes=(1, 2, 3, 4, 5, 6), lanes=6), heads_sizes)
def test_no_deadlock_where_groups_are_not_nested(
    lanes: list[list[Shared]], heads: frozenset[int]
) -> None:
    ops = [issued(packs, heads) for packs in lanes]
    assert same_order_for_every_two(ops)
    assert run_blocking(ops) == []


def test_the_simulation_finds_a_deadlock() -> None:
    """One gather ahead in backward, with groups of 4, 3 and 2 of which two lanes share two."""
    g4, r4 = Op("gather", 0, 4, 0), Op("reduce", 0, 4, 0)
    g3, r3 = Op("gather", 3, 3, 0), Op("reduce", 3, 3, 0)
    g2, r2 = Op("gather", 2, 2, 0), Op("reduce", 2, 2, 0)
    lanes = [[g4, r4]] * 2 + [[g4, g2, r4, r2], [g4, g3, r4, g2, r3, r2]] + [[g3, r3]] * 2
    assert not same_order_for_every_two(lanes)
    assert 3 in run_blocking(lanes)


def words(steps, sizes: list[int]) -> str:
    return ", ".join(f"{action} {sizes[pack]}" for action, pack in steps)


def test_worked_example() -> None:
    sizes = [8, 4, 1]
    assert words(forward_steps(sizes), sizes) == (
        "gather 8, attend 1, gather 4, attend 8, attend 4"
    )
    assert words(backward_steps(sizes), sizes) == (
        "gather 8, gather 4, attend 1, attend 8, reduce 8, attend 4, reduce 4"
    )


@given(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=5))
def test_every_pack_once_and_at_most_one_gather_ahead(sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    steps = forward_steps(sizes)
    shared = [place for place, size in enumerate(sizes) if size > 1]
    assert [pack for action, pack in steps if action == "gather"] == shared
    assert sorted(pack for action, pack in steps if action == "attend") == list(range(len(sizes)))
    travelling = set()
    for action, pack in steps:
        (travelling.add if action == "gather" else travelling.discard)(pack)
        assert len(travelling) <= 2
    backward = backward_steps(sizes)
    assert [pack for action, pack in backward if action == "reduce"] == shared
    for place in shared:
        order = [action for action, pack in backward if pack == place]
        assert order == ["gather", "attend", "reduce"]


@pytest.mark.parametrize("steps", [forward_steps, backward_steps])
def test_a_lane_without_shared_packs_begins_nothing(steps) -> None:
    assert [action for action, _ in steps([1, 1])] == ["attend", "attend"]
    assert steps([]) == []
