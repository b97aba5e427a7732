"""What lanes gather from each other: measured for each CP size where there are several ranks.

In: a topology of several lanes. Out: a GatherCost for each CP size above 1, the same on all ranks.
With one rank nothing is measured, and the costs are arithmetic: 360 GB/s inside a node of 8 GPUs
and 45 GB/s across nodes, of a CPU's ranks 5 GB/s.

    4 lanes, CP size 4, 3 shards of 16 MiB gathered in 0.14 ms: 1 / 360 GB/s
"""

import statistics
import time

import torch
from torch.distributed import ProcessGroup

from longshore.arch.machine import GatherCost
from longshore.calibrate.timing import Timer
from longshore.distributed.collectives import gather, sum_over
from longshore.distributed.cp_groups import CPGroups
from longshore.distributed.process_group import Rendezvous, process_group
from longshore.distributed.topology import Topology, make_topology
from longshore.plan.shapes import legal_cp_sizes
from longshore.train.device import pick_backend

SHARD_BYTES = 16 << 20
NODE = 8
INSIDE, ACROSS, CPU = 1 / 360e9, 1 / 45e9, 1 / 5e9
"""Seconds of a byte."""


def arithmetic_gathers(device: str) -> tuple[GatherCost, ...]:
    inside, across = (INSIDE, ACROSS) if device == "cuda" else (CPU, CPU)
    return GatherCost(NODE, inside, "arithmetic"), GatherCost(2 * NODE, across, "arithmetic")


def measure_gathers(topology: Topology, timer: Timer, *, node: int) -> tuple[GatherCost, ...]:
    """All ranks call it together; their mean counts. node: ranks of a node."""
    costs = []
    sizes = [size for size in legal_cp_sizes(topology.lanes) if size > 1]
    groups = CPGroups(topology, sizes)
    own = {size: first for first, size in groups.keys}
    shard = torch.ones(SHARD_BYTES, dtype=torch.uint8, device=timer.device)
    for size in sizes:
        seconds = 0.0
        if size in own:
            seconds = _gather_seconds(shard, groups.group(own[size], size), timer)
        each = torch.tensor([seconds, float(size in own)], dtype=torch.float64, device=timer.device)
        total, ranks = sum_over(each, topology.groups.world).tolist()
        costs.append(GatherCost(size, total / ranks / ((size - 1) * SHARD_BYTES), "measured"))
    groups.close()
    known = arithmetic_gathers(timer.device.type)
    inside = [] if any(each.cp_size <= node for each in costs) else [known[0]]
    across = [] if any(each.cp_size > node for each in costs) else [known[1]]
    return *costs, *inside, *across


def _gather_seconds(shard: torch.Tensor, group: ProcessGroup, timer: Timer) -> float:
    """The median of a fixed number of calls: all ranks of the group call it as often."""
    times = []
    for _ in range(2 + timer.repeats):
        timer.sync()
        begin = time.perf_counter()
        gather(shard, group)
        timer.sync()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def gathers_between_ranks(
    rank: int, world_size: int, device: torch.device, *, local_size: int
) -> tuple[GatherCost, ...]:
    """Joins the ranks that torchrun started, measures, and leaves them. All ranks call it."""
    where, backend = Rendezvous(rank, world_size, "env://"), pick_backend(device, local_size)
    with process_group(where, backend=backend, device=device):
        topology = make_topology(lanes=world_size, device=device)
        return measure_gathers(topology, Timer(device, repeats=7), node=local_size)
