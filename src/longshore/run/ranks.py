"""Ranks: the rank of a process in its run, and the rendezvous of all ranks.

The second of four local ranks is Ranks(1, 4, 1, 4, "file:///tmp/longshore-x/store"); under torchrun
the last is "env://". Both are what torch.distributed.init_process_group takes as init_method.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process of a run."""

    rank: int
    """Of this process, from 0."""
    world_size: int
    """Processes of the run."""
    local_rank: int
    """Of this process among those of its machine."""
    local_size: int
    """Processes of this machine."""
    rendezvous: str
    """Where they meet."""
