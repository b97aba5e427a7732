"""The default process group of a rank, from the first to the last of its collectives.

In: the rank's place, a backend, its device. Out: an open default group, closed at the end.
Rendezvous(1, 4, "file:///tmp/store") is the second of four ranks that find each other in a file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """address: "env://" under torchrun, or "file:///…"."""

    rank: int
    world_size: int
    address: str


@contextmanager
def process_group(where: Rendezvous, *, backend: str, device: torch.device) -> Iterator[None]:
    """NCCL connects at once, so that CP groups can be split off it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=where.address,
        rank=where.rank,
        world_size=where.world_size,
        device_id=device if backend == "nccl" else None,
    )
    yield
    # Only after success: a failed rank's groups cannot be taken down, and the process ends anyway.
    dist.barrier()
    dist.destroy_process_group()
