"""Ranks: where a process stands among those of its run, and where they meet.

The second of four local ranks is Ranks(1, 4, 1, 4, "file:///tmp/longshore-x/store"); under torchrun
the last is "env://". Both are what torch.distributed.init_process_group takes as init_method.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """local_rank, local_size: among those of the same machine."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    rendezvous: str
