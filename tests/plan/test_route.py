import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.chunks import chunk_ranges

from longshore.plan.cost import CostProfile
from longshore.plan.shapes import Transfer, padded_length, route
from longshore.plan.types import Pack, Plan, PlanSetting, Round, Sequence, Stats

PROFILE = CostProfile(linear=1.0, quadratic=0.0, gather=(0.0, 0.0), node=8, pack=0.0, round=0.0)
NO_STATS = Stats(0, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0)


def plan_of(lengths: list[int], rounds: list[Round], lanes: int) -> Plan:
    setting = PlanSetting(
        lanes=lanes,
        capacity=10_000,
        policy="mixed",
        sync="round",
        cp_sizes=tuple(range(1, lanes + 1)),
        profile=PROFILE,
        align=1,
        max_sequences=None,
        pp=1,
        vpp=1,
    )
    sequences = tuple(Sequence(100 + i, n, n) for i, n in enumerate(lengths))
    return Plan(setting, sequences, tuple(rounds), NO_STATS, "")


@st.composite
def routed_plans(draw: st.DrawFn) -> tuple[Plan, list[int]]:
    """A random plan of aligned packs on a few lanes, and random owners."""
    lanes = draw(st.integers(1, 7))
    groups = [(first, k) for k in range(1, lanes + 1) for first in range(0, lanes - k + 1, k)]
    lengths: list[int] = []
    rounds = []
    for chosen in draw(st.lists(st.sets(st.sampled_from(groups)), min_size=1, max_size=3)):
        packs = []
        for first, k in sorted(chosen, key=lambda group: (-group[1], group[0])):
            new = draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))
            places = tuple(range(len(lengths), len(lengths) + len(new)))
            lengths += new
            packs.append(Pack(first, k, places, sum(padded_length(n, k) // k for n in new)))
        rounds.append(Round(tuple(packs)))
    owners = draw(st.lists(st.integers(0, lanes - 1), min_size=len(lengths), max_size=len(lengths)))
    return plan_of(lengths, rounds, lanes), owners


def tokens_of(length: int, transfer: Transfer) -> list[int]:
    ranges = chunk_ranges(length, transfer.cp_rank, transfer.cp_size)
    return [token for start, stop in ranges for token in range(start, stop)]


def test_chunks_by_hand() -> None:
    assert chunk_ranges(8, 0, 2) == [(0, 2), (6, 8)]
    assert chunk_ranges(8, 1, 2) == [(2, 4), (4, 6)]
    assert chunk_ranges(7, 0, 2) == [(0, 2), (6, 7)]
    assert chunk_ranges(5, 0, 1) == [(0, 5)]
    assert chunk_ranges(1, 0, 4) == [(0, 1)]
    assert chunk_ranges(1, 3, 4) == []


@given(st.integers(1, 200), st.integers(1, 9))
def test_chunks_cut_a_sequence_without_rest(length: int, k: int) -> None:
    held = [t for rank in range(k) for a, b in chunk_ranges(length, rank, k) for t in range(a, b)]
    assert sorted(held) == list(range(length))
    per_lane = padded_length(length, k) // k
    for rank in range(k):
        ranges = chunk_ranges(length, rank, k)
        assert ranges == sorted(ranges)
        assert sum(b - a for a, b in ranges) <= per_lane


@given(st.integers(1, 60), st.integers(2, 6))
def test_chunks_are_the_zigzag_of_the_padded_sequence(length: int, k: int) -> None:
    padded = [t if t < length else -1 for t in range(padded_length(length, k))]
    chunks = np.array(padded).reshape(2 * k, -1)
    for rank in range(k):
        shard = np.concatenate([chunks[rank], chunks[2 * k - 1 - rank]])
        ranges = chunk_ranges(length, rank, k)
        assert [t for a, b in ranges for t in range(a, b)] == shard[shard >= 0].tolist()


def test_route_by_hand() -> None:
    rounds = [
        Round((Pack(0, 2, (0,), 4), Pack(1, 1, (2, 1), 5))),
        Round((Pack(0, 1, (3,), 9),)),
    ]
    routes = route(plan_of([7, 2, 3, 9], rounds, 2), [1, 0, 0, 1])
    assert routes[1, 0] == (Transfer(0, 0, 1, 0, 0, 2), Transfer(3, 1, 1, 0, 0, 1))
    assert routes[1, 1] == (Transfer(0, 0, 1, 1, 1, 2),)
    assert routes[0, 1] == (Transfer(2, 0, 0, 1, 0, 1), Transfer(1, 0, 0, 1, 0, 1))
    assert (0, 0) not in routes


@given(routed_plans())
def test_every_token_arrives_once(case: tuple[Plan, list[int]]) -> None:
    plan, owners = case
    routes = route(plan, owners)
    arrived: dict[int, list[int]] = {i: [] for i in range(len(owners))}
    for transfer in (transfer for transfers in routes.values() for transfer in transfers):
        assert transfer.source == owners[transfer.sequence]
        length = plan.sequences[transfer.sequence].length
        arrived[transfer.sequence] += tokens_of(length, transfer)
    for sequence, tokens in arrived.items():
        assert sorted(tokens) == list(range(plan.sequences[sequence].length))


@given(routed_plans())
def test_a_lane_receives_what_the_plan_says_it_holds(case: tuple[Plan, list[int]]) -> None:
    plan, owners = case
    routes = route(plan, owners)
    for lane in range(plan.setting.lanes):
        want = [
            (number, sequence, lane - pack.first_lane, pack.cp_size)
            for number, pack in plan.packs()
            if lane in pack.lanes
            for sequence in pack.sequences
        ]
        got = [
            (t.round, t.sequence, t.cp_rank, t.cp_size)
            for (_, destination), found in routes.items()
            if destination == lane
            for t in found
        ]
        assert sorted(got) == sorted(want)
        assert len(got) == len(set(got))


@given(routed_plans())
def test_pairs_keep_the_order_of_the_plan(case: tuple[Plan, list[int]]) -> None:
    plan, owners = case
    routes = route(plan, owners)
    place = {
        (number, sequence): at
        for at, (number, sequence) in enumerate(
            (number, sequence) for number, pack in plan.packs() for sequence in pack.sequences
        )
    }
    for (source, destination), found in routes.items():
        assert {t.source for t in found} == {source}
        assert {t.destination for t in found} == {destination}
        places = [place[t.round, t.sequence] for t in found]
        assert places == sorted(places)


@pytest.mark.parametrize("owner", [-1, 2, 0.0, True, "0"])
def test_refuses_an_owner_that_is_no_lane(owner: int) -> None:
    plan = plan_of([3, 4], [Round((Pack(0, 1, (0, 1), 7),))], 2)
    with pytest.raises(ValueError, match=f"sequence 1 is owned by {owner!r}.* from 0 to 1"):
        route(plan, [0, owner])


def test_takes_numpy_owners_and_refuses_a_wrong_count() -> None:
    plan = plan_of([3, 4], [Round((Pack(0, 1, (0, 1), 7),))], 2)
    assert route(plan, list(np.array([1, 0])))[1, 0] == (Transfer(0, 0, 1, 0, 0, 1),)
    with pytest.raises(ValueError, match="1 owners for 2 sequences"):
        route(plan, [0])
