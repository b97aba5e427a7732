import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks.harness import run_ranks

from longshore.distributed.topology import make_topology
from longshore.plan.types import AXES, EXPERT_AXES, Axes

SIZES = st.integers(1, 6)


def test_the_worked_example():
    axes = Axes(lanes=3, tp=2, pp=2)
    assert axes.world_size == 12
    assert (axes.pp_rank_of(9), axes.lane_of(9), axes.tp_rank_of(9)) == (1, 1, 1)
    assert axes.rank_at(pp_rank=1, lane=1, tp_rank=1) == 9
    assert axes.rank_at(lane=1) == 2
    assert [7, 9, 11] in axes.blocks("lanes")
    axes = Axes(lanes=3, tp=2, pp=2, ep=3)
    assert axes.blocks("ep") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert axes.ep_rank_of(9) == 0
    assert [6, 9] in axes.blocks("expert_replicas")


def test_experts_may_span_lanes_and_tp_ranks():
    axes = Axes(lanes=32, tp=8, ep=64)
    assert axes.blocks("ep")[1] == list(range(64, 128))
    assert axes.blocks("expert_replicas")[63] == [63, 127, 191, 255]


@pytest.mark.property
@given(lanes=SIZES, tp=SIZES, pp=SIZES)
def test_ranks_and_coordinates_are_one_to_one(lanes, tp, pp):
    axes = Axes(lanes=lanes, tp=tp, pp=pp)
    for rank in range(axes.world_size):
        lane, tp_rank, pp_rank = axes.lane_of(rank), axes.tp_rank_of(rank), axes.pp_rank_of(rank)
        assert axes.rank_at(lane=lane, tp_rank=tp_rank, pp_rank=pp_rank) == rank


@pytest.mark.property
@given(lanes=SIZES, tp=SIZES, pp=SIZES)
def test_each_rank_is_once_in_each_axis(lanes, tp, pp):
    axes = Axes(lanes=lanes, tp=tp, pp=pp)
    every = list(range(axes.world_size))
    for axis in AXES:
        blocks = axes.blocks(axis)
        assert sorted(rank for block in blocks for rank in block) == every
        assert all(len(block) == getattr(axes, axis) for block in blocks)


@pytest.mark.property
@given(st.data(), SIZES, SIZES, SIZES)
def test_each_rank_is_once_in_an_ep_group_and_once_among_replicas(data, lanes, tp, pp):
    ep = data.draw(st.sampled_from([n for n in range(1, lanes * tp + 1) if lanes * tp % n == 0]))
    axes = Axes(lanes=lanes, tp=tp, pp=pp, ep=ep)
    every = list(range(axes.world_size))
    for axis, size in (("ep", ep), ("expert_replicas", lanes * tp // ep)):
        blocks = axes.blocks(axis)
        assert sorted(rank for block in blocks for rank in block) == every
        assert all(len(block) == size for block in blocks)
        assert all(len({axes.pp_rank_of(rank) for rank in block}) == 1 for block in blocks)
    for block in axes.blocks("ep"):
        assert block == list(range(block[0], block[0] + ep))
        assert [axes.ep_rank_of(rank) for rank in block] == list(range(ep))
    for block in axes.blocks("expert_replicas"):
        assert len({axes.ep_rank_of(rank) for rank in block}) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"lanes": 0}, r"lanes is 0; it must be an integer of at least 1"),
        ({"lanes": 2.0}, r"lanes is 2\.0"),
        ({"lanes": 2, "tp": -1}, r"tp is -1"),
        ({"lanes": 2, "pp": True}, r"pp is True"),
        ({"lanes": 6, "ep": 4}, r"ep is 4, .* not divide the 6 ranks .*; use one of 1, 2, 3, 6"),
        (
            {"lanes": 3, "tp": 2, "ep": 4},
            r"ep is 4, .* not divide the 6 ranks .*3 lanes × parallel.tp 2.; use one of 1, 2, 3, 6",
        ),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Axes(**sizes)


def test_ranks_that_do_not_fit_are_refused():
    Axes(lanes=4, tp=2).check_world_size(8)
    with pytest.raises(
        ValueError,
        match="4 lanes × tp 2 × pp 1 make 8 ranks, but there are 6; start 8, or set lanes to 3",
    ):
        Axes(lanes=4, tp=2).check_world_size(6)
    with pytest.raises(ValueError, match=r"but there are 7; start 8$"):
        Axes(lanes=4, tp=2).check_world_size(7)


@pytest.mark.parametrize("place", [{"lane": 2}, {"lane": -1}, {"lane": 0, "tp_rank": 1}])
def test_coordinates_outside_are_refused(place):
    with pytest.raises(ValueError, match="must be from 0 to"):
        Axes(lanes=2).rank_at(**place)


def test_without_a_default_group_there_is_no_topology():
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        make_topology(lanes=1, device="cpu")


def members(group):
    """The world ranks of a group, learned through the group itself."""
    found = torch.full((group.size(),), -1)
    found[group.rank()] = dist.get_rank()
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.tolist()


def groups_of(groups):
    return {name: members(getattr(groups, name)) for name in ("world", *AXES)}


def open_groups():
    return len(dist.distributed_c10d._world.pg_map)


def describe():
    topology = make_topology(lanes=2, tp=2, pp=2, ep=2, device="cpu")
    before = open_groups()
    mine = groups_of(topology.groups)
    host = topology.host_groups()
    theirs = groups_of(host)
    host.close()
    assert open_groups() == before
    mine |= {"ep": members(topology.experts.ep)}
    mine |= {"expert_replicas": members(topology.experts.replicas.get_group())}
    place = topology.lane, topology.tp_rank, topology.pp_rank, topology.is_first_of_lane
    assert topology.ep_rank == topology.experts.ep.rank()
    assert str(topology.device) == "cpu"
    assert topology.mesh.shape == (2, 2, 2)
    topology.close()
    assert open_groups() == 1
    return topology.rank, place, mine, theirs


def test_each_rank_stands_at_its_place_and_talks_in_its_groups():
    axes = Axes(lanes=2, tp=2, pp=2, ep=2)
    for rank, (told, place, mine, theirs) in enumerate(run_ranks(8, describe)):
        assert told == rank
        first = rank in (0, 2)
        assert place == (axes.lane_of(rank), axes.tp_rank_of(rank), axes.pp_rank_of(rank), first)
        every = dict.fromkeys([*AXES, *EXPERT_AXES])
        wanted = {a: next(b for b in axes.blocks(a) if rank in b) for a in every}
        assert mine == {"world": list(range(8)), **wanted}
        assert theirs == {name: mine[name] for name in theirs}


def count_groups():
    """Groups that layers of experts add, for several sizes."""
    added = []
    for sizes in ({}, {"ep": 2}, {"ep": 4}, {"lanes": 2, "tp": 2}):
        topology = make_topology(**{"lanes": 4, "device": "cpu", **sizes})
        added.append(len(topology.experts.created) if topology.experts else 0)
        topology.close()
        assert open_groups() == 1
    return added


def test_experts_add_at_most_two_groups():
    """None without TP and EP; with EP over all lanes, or on no others, one."""
    assert run_ranks(4, count_groups) == [[0, 2, 1, 1]] * 4


def refuse():
    groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ValueError, match="3 lanes × tp 1 × pp 1 make 3 ranks, but there are 2"):
        make_topology(lanes=3, device="cpu")
    with pytest.raises(ValueError, match="give this rank's own GPU, such as 'cuda:0'"):
        make_topology(lanes=2, device="cuda")
    assert len(dist.distributed_c10d._world.pg_map) == groups


def test_a_wrong_size_is_refused_before_a_group_is_formed():
    run_ranks(2, refuse)
