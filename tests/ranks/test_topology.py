import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks.harness import run_ranks

from longshore.distributed.topology import AXES, Axes, make_topology

SIZES = st.integers(1, 6)


def test_the_worked_example():
    axes = Axes(lanes=3, tp=2, pp=2)
    assert axes.world_size == 12
    assert (axes.pp_rank_of(9), axes.lane_of(9), axes.tp_rank_of(9)) == (1, 1, 1)
    assert axes.rank_at(pp_rank=1, lane=1, tp_rank=1) == 9
    assert axes.ranks_of_lane(1) == (2, 3, 8, 9)
    assert axes.first_rank_of_lane(1) == 2
    assert [7, 9, 11] in axes.blocks("lanes")


@pytest.mark.property
@given(lanes=SIZES, tp=SIZES, pp=SIZES)
def test_ranks_and_coordinates_are_one_to_one(lanes, tp, pp):
    axes = Axes(lanes=lanes, tp=tp, pp=pp)
    for rank in range(axes.world_size):
        lane, tp_rank, pp_rank = axes.lane_of(rank), axes.tp_rank_of(rank), axes.pp_rank_of(rank)
        assert axes.rank_at(lane=lane, tp_rank=tp_rank, pp_rank=pp_rank) == rank
        assert rank in axes.ranks_of_lane(lane)


@pytest.mark.property
@given(lanes=SIZES, tp=SIZES, pp=SIZES)
def test_each_rank_is_once_in_each_axis(lanes, tp, pp):
    axes = Axes(lanes=lanes, tp=tp, pp=pp)
    every = list(range(axes.world_size))
    for axis in AXES:
        blocks = axes.blocks(axis)
        assert sorted(rank for block in blocks for rank in block) == every
        assert all(len(block) == getattr(axes, axis) for block in blocks)
    assert sorted(rank for lane in range(lanes) for rank in axes.ranks_of_lane(lane)) == every


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"lanes": 0}, r"lanes is 0; it must be an integer of at least 1"),
        ({"lanes": 2.0}, r"lanes is 2\.0"),
        ({"lanes": 2, "tp": -1}, r"tp is -1"),
        ({"lanes": 2, "pp": True}, r"pp is True"),
        ({"lanes": 6, "ep": 4}, r"ep is 4 and does not divide the 6 lanes; use one of 1, 2, 3, 6"),
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


def describe():
    topology = make_topology(lanes=2, tp=2, pp=2, ep=2, device="cpu")
    before = len(dist.distributed_c10d._world.pg_map)
    mine = groups_of(topology.groups)
    host = topology.host_groups()
    theirs = groups_of(host)
    host.close()
    assert len(dist.distributed_c10d._world.pg_map) == before
    place = topology.lane, topology.tp_rank, topology.pp_rank, topology.is_first_of_lane
    assert str(topology.device) == "cpu"
    assert topology.mesh.shape == (2, 2, 2)
    topology.groups.close()
    assert len(dist.distributed_c10d._world.pg_map) == 1
    return topology.rank, place, mine, theirs


def test_each_rank_stands_at_its_place_and_talks_in_its_groups():
    axes = Axes(lanes=2, tp=2, pp=2)
    for rank, (told, place, mine, theirs) in enumerate(run_ranks(8, describe)):
        assert told == rank
        first = rank in (0, 2)
        assert place == (axes.lane_of(rank), axes.tp_rank_of(rank), axes.pp_rank_of(rank), first)
        wanted = {a: next(b for b in axes.blocks(a) if rank in b) for a in AXES}
        assert mine == theirs == {"world": list(range(8)), **wanted}


def refuse():
    groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ValueError, match="3 lanes × tp 1 × pp 1 make 3 ranks, but there are 2"):
        make_topology(lanes=3, device="cpu")
    with pytest.raises(ValueError, match="give this rank's own GPU, such as 'cuda:0'"):
        make_topology(lanes=2, device="cuda")
    assert len(dist.distributed_c10d._world.pg_map) == groups


def test_a_wrong_size_is_refused_before_a_group_is_formed():
    run_ranks(2, refuse)
