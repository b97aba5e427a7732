"""What one micro-batch of a model exchanges, counted."""

import torch.distributed as dist
from tests.ranks.spine import batches_of, exact, lanes_of, make_samples, sharded

from longshore.arch.decoder import DecoderConfig
from longshore.distributed.collectives import count
from longshore.plan import make_plan

Calls = list[tuple[str, int]]


def exchanged(config: DecoderConfig, cp_size: int, **ways) -> tuple[int, Calls, Calls]:
    """The lane's rows of shared packs, and the name and bytes of each call forward and backward."""
    lanes = dist.get_world_size()
    sizes = {"policy": "static", "cp_size": cp_size, "cp_sizes": "any"}
    plan = make_plan([50, 3], lanes=lanes, capacity=128, **sizes)
    with lanes_of(lanes) as (topology, groups):
        model = sharded(config, topology, groups, exact(mode="none", **ways))
        (batch,) = batches_of(plan, make_samples(plan), topology.lane)
        with count() as forward:
            nll = model(batch.token_ids, batch.ctx, batch.targets.labels).values
        with count() as backward:
            nll.sum().backward()
    rows = sum(pack.stop - pack.start for pack in batch.ctx.packs if pack.group.cp_size > 1)
    logs = [[(call.name, call.bytes) for call in c.log] for c in (forward, backward)]
    return rows, *logs
