"""What lanes gather is measured between ranks, alike on all of them."""

import torch
from tests.ranks.harness import run_ranks

from longshore.advisor import calibrate as links
from longshore.advisor.timing import Timer
from longshore.distributed.topology import make_topology


def measure(node):
    links.SHARD_BYTES = 1 << 10
    device = torch.device("cpu")
    topology = make_topology(lanes=3, device=device)
    costs = links.measure_gathers(topology, Timer(device, repeats=2), node=node)
    return [(each.cp_size, each.byte, each.origin) for each in costs]


def test_each_cp_size_is_measured_and_the_rest_is_arithmetic():
    """Lane 2 has no group of two, and takes the others' figure."""
    first, *others = run_ranks(3, measure, 3)
    assert all(costs == first for costs in others)
    assert [(size, origin) for size, _, origin in first] == [
        (2, "measured"),
        (3, "measured"),
        (16, "arithmetic"),
    ]
    assert all(byte > 0 for _, byte, _ in first)
