"""What advisor/peak_memory.py counts is what ranks really open."""

from collections import Counter

import torch
import torch.distributed as dist
from tests.ranks.harness import run_ranks
from tests.ranks.spine import dense

from longshore.advisor.peak_memory import joined_groups
from longshore.distributed.topology import CPGroups, make_topology
from longshore.parallel.fsdp import _replicas
from longshore.parallel.pipeline import EmbeddingCopies, Stages
from longshore.plan.layout import parse_layout
from longshore.plan.shapes import legal_cp_sizes
from longshore.plan.types import Axes

SHAPES = ((2, 2, 2, 1), (2, 2, 1, 4), (4, 1, 1, 2), (3, 1, 2, 1))
"""lanes, tp, pp and ep."""


def open_ranks() -> Counter[int]:
    """How many groups of each size this rank is in."""
    groups = dist.distributed_c10d._world.pg_map
    return Counter(len(dist.get_process_group_ranks(group)) for group in groups)


def opened(lanes: int, tp: int, pp: int, ep: int) -> Counter[int]:
    topology = make_topology(lanes=lanes, tp=tp, pp=pp, ep=ep, device="cpu")
    opened_groups = [topology]
    with CPGroups(topology, legal_cp_sizes(lanes)):
        copies = None
        if pp > 1:
            layout = parse_layout("Et|tL", pp=2, layers=2, depths=0)
            with torch.device("meta"):
                model = Stages(dense(tied=True), layout, pp_rank=topology.pp_rank)
            copies = EmbeddingCopies(model, topology)
        opened_groups += [topology.host_groups(), topology.host_groups()]
        _replicas(topology)
        ranks = open_ranks()
    for groups in opened_groups:
        groups.close()
    if copies is not None:
        copies.close()
    return ranks


def test_the_groups_counted_are_the_groups_that_ranks_open():
    for lanes, tp, pp, ep in SHAPES:
        counted = joined_groups(
            Axes(lanes=lanes, tp=tp, pp=pp, ep=ep), copies=2 if pp > 1 else 1, replicated_stages=1
        )
        ranks = run_ranks(lanes * tp * pp, opened, lanes, tp, pp, ep)
        assert ranks[0] == Counter(group.ranks for group in counted)
        assert all(joined.total() <= len(counted) for joined in ranks)
