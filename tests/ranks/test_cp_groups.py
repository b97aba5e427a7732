import os

import pytest
import torch
import torch.distributed as dist
from tests.ranks.harness import run_ranks

from longshore.distributed.topology import (
    CPGroups,
    check_cp_sizes,
    cp_blocks,
    cp_ranks,
    make_topology,
)
from longshore.plan.shapes import legal_cp_sizes
from longshore.plan.types import Axes


def test_blocks_are_aligned_and_leave_the_rest_out():
    assert cp_blocks(6, 4) == [range(4)]
    assert cp_blocks(6, 2) == [range(2), range(2, 4), range(4, 6)]
    assert cp_blocks(6, 6) == [range(6)]
    assert cp_blocks(1, 1) == [range(1)]


@pytest.mark.parametrize("lanes", [1, 2, 5, 6, 8])
def test_splits_hold_every_rank_once(lanes):
    axes = Axes(lanes=lanes, tp=2, pp=2)
    for size in range(1, lanes + 1):
        groups, left_over = cp_ranks(axes, size)
        blocks = groups + left_over
        assert sorted(r for block in blocks for r in block) == list(range(axes.world_size))
        assert all(block == sorted(block) for block in blocks)
    assert cp_ranks(Axes(lanes=6), 4) == ([[0, 1, 2, 3]], [[4, 5]])


@pytest.mark.parametrize(
    ("sizes", "lanes", "message"),
    [
        ([], 4, "there are no CP sizes"),
        ([0, 1], 4, "CP size 0: it must be from 1 to the number of lanes, 4"),
        ([8], 4, "CP size 8"),
        ([1, 2, 3], 65, "CP size 3: with more than 64 lanes it must be a power of two, or all 65"),
    ],
)
def test_bad_sizes_are_refused(sizes, lanes, message):
    with pytest.raises(ValueError, match=message):
        check_cp_sizes(sizes, lanes)


def test_good_sizes_are_sorted():
    assert check_cp_sizes([6, 2, 2, 1, 4], 6) == (1, 2, 4, 6)
    assert check_cp_sizes([3, 64], 64) == (3, 64)
    assert check_cp_sizes([64, 65], 65) == (64, 65)


def members(group):
    """The world ranks of a group, learned through the group itself."""
    found = torch.full((group.size(),), -1)
    found[group.rank()] = dist.get_rank()
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.tolist()


def open_groups(lanes, tp, pp, kind):
    topology = make_topology(lanes=lanes, tp=tp, pp=pp, device="cpu")
    with CPGroups(topology, legal_cp_sizes(lanes, kind=kind)) as groups:
        found = {key: members(groups.group(*key)) for key in groups.keys}
        for first, size in groups.keys:
            assert groups.group(first, size).rank() == topology.lane - first
    return found


@pytest.mark.parametrize(
    ("lanes", "tp", "pp", "kind"),
    [(1, 1, 1, "pow2"), (4, 1, 1, "pow2"), (6, 1, 1, "pow2"), (5, 1, 1, "any"), (3, 2, 1, "any"),
     (2, 2, 2, "pow2"), (8, 1, 1, "any")],
)  # fmt: skip
def test_each_rank_has_its_aligned_groups(lanes, tp, pp, kind):
    axes = Axes(lanes=lanes, tp=tp, pp=pp)
    for rank, found in enumerate(run_ranks(axes.world_size, open_groups, lanes, tp, pp, kind)):
        place = {"tp_rank": axes.tp_rank_of(rank), "pp_rank": axes.pp_rank_of(rank)}
        wanted = {
            (block.start, size): [axes.rank_at(lane=lane, **place) for lane in block]
            for size in legal_cp_sizes(lanes, kind=kind)
            for block in cp_blocks(lanes, size)
            if axes.lane_of(rank) in block
        }
        assert found == wanted


def ask_for_another():
    topology = make_topology(lanes=3, device="cpu")
    groups = CPGroups(topology, [1, 2])
    messages = []
    for first, size in [(2, 2), (0, 2), (0, 3)]:
        try:
            groups.group(first, size)
        except ValueError as error:
            messages.append(str(error))
    groups.close()
    groups.close()
    with pytest.raises(ValueError, match="all its groups are closed"):
        groups.group(topology.lane, 1)
    return messages


def test_a_group_that_does_not_hold_the_rank_is_named():
    first, _, last = run_ranks(3, ask_for_another)
    assert first == [
        "rank 0 (lane 0 of 3) has no CP group of size 2 from lane 2; it has groups of size "
        "1 from lane 0, 2 from lane 0",
        "rank 0 (lane 0 of 3) has no CP group of size 3 from lane 0; it has groups of size "
        "1 from lane 0, 2 from lane 0",
    ]
    assert len(last) == 3


def footprint():
    world = dist.distributed_c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag)
    groups = tuple(len(table) for table in tables)
    tagged = sum(len(found) for found in world.tags_to_pg.values())
    proc = tuple(len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return (*groups, tagged, *proc)


def open_and_close(cycles):
    topology = make_topology(lanes=6, device="cpu")
    seen = []
    for _ in range(cycles):
        seen.append(footprint())
        groups = CPGroups(topology, [1, 2, 4, 6])
        for first, size in groups.keys:
            total = torch.ones(1000)
            dist.all_reduce(total, group=groups.group(first, size))
            assert total[0] == size
        groups.close()
        dist.barrier()
    seen.append(footprint())
    return seen


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_ten_cycles_leak_no_group_file_or_thread():
    for seen in run_ranks(6, open_and_close, 10):
        assert len(set(seen[1:])) == 1, seen
        assert seen[0][:5] == seen[-1][:5]
