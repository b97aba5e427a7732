"""This process as a rank of the run: its device, its kernels, its signals, its process group.

In: a configuration and this rank's place. Out: a Topology and a Stop, for as long as the block
lasts. Rank 5 of 8 on two machines of 4 GPUs is local rank 1, on cuda:1, with NCCL; on CPUs all
ranks talk through gloo. After the block kernels and signals are those from before it.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch

from longshore.config.check import lanes_of
from longshore.config.schema import RunConfig
from longshore.distributed.process_group import Rendezvous, attempt_address, process_group
from longshore.distributed.topology import Topology, make_topology
from longshore.ops.backends import only
from longshore.run.ranks import Ranks
from longshore.train.device import pick_backend, pick_device, pick_dtype, preferred_blas
from longshore.train.heartbeat import RankStatus
from longshore.train.stop import Stop, supervised


@contextmanager
def joined_ranks(
    config: RunConfig, ranks: Ranks, *, attempt: int, signals: bool
) -> Iterator[tuple[Topology, Stop]]:
    """All ranks enter it together. attempt: of torchrun, from 0.

    signals: whether signals stop the run after a step, and a rank that hangs is reported.
    """
    device = pick_device(config.train.device, ranks.local_rank)
    dtype = pick_dtype(config.train.dtype, device)
    backend = pick_backend(device, ranks.local_size)
    address = attempt_address(ranks.rendezvous, attempt)
    rendezvous = Rendezvous(ranks.rank, ranks.world_size, address)
    limit, status = timedelta(minutes=config.parallel.timeout_min), RankStatus()
    with (
        preferred_blas(device, dtype, platform.machine()),
        only(config.train.kernels),
        supervised(status, rank=ranks.rank, ranks=ranks.world_size, address=ranks.rendezvous)
        if signals
        else nullcontext(Stop(status)) as stop,
        process_group(rendezvous, backend=backend, device=device, timeout=limit),
    ):
        lanes, parallel = lanes_of(config, ranks.world_size), config.parallel
        topology = make_topology(
            lanes=lanes, tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, device=device
        )
        torch.manual_seed(config.train.seed + topology.rank)
        yield topology, stop
