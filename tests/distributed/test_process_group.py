"""The time-out of a run is that of all its groups, and after it torch is as before."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_timeout

from longshore.distributed.process_group import Ranks, process_group
from longshore.distributed.topology import make_topology

CPU = torch.device("cpu")


def time_out(group):
    return group._get_backend(CPU).options._timeout


def test_every_group_has_the_time_out_of_the_run(tmp_path):
    limit, before = timedelta(seconds=77), _get_default_timeout("gloo")
    hook = sys.excepthook
    ranks = Ranks(0, 1, 0, 1, f"file://{tmp_path}/store")
    with process_group(ranks, backend="gloo", device=CPU, timeout=limit):
        topology = make_topology(lanes=1, device="cpu")
        other = topology.host_groups()
        groups = [dist.group.WORLD, topology.groups.lanes, other.world, other.lanes]
        assert [time_out(group) for group in groups] == [limit] * 4
        other.close()
    assert _get_default_timeout("gloo") == before
    assert sys.excepthook is hook
