"""Ranks: the rank of a process in its run, and the rendezvous of all ranks. No torch.

The second of four local ranks is Ranks(1, 4, 1, 4, "file:///tmp/longshore-x/store"); under torchrun
the last is "env://". Both are what torch.distributed.init_process_group takes as init_method. What
torchrun says is read from the environment; `loopback` sets variables for the time of a block.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from longshore.files import temporary_folder

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = ("lo", "lo0")


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

    @property
    def is_one_machine(self) -> bool:
        return self.local_size == self.world_size


def ranks_from_environment() -> Ranks | None:
    """This process's place if torchrun started it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    texts = [os.environ.get(name) for name in names]
    if None in texts:
        return None
    try:
        rank, world_size, local_rank = (int(text or "") for text in texts)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError:
        raise ValueError(
            f"{', '.join(names)} of the environment must be numbers; start with torchrun, or unset "
            "them"
        ) from None
    return Ranks(rank, world_size, local_rank, local_size, "env://")


@contextmanager
def alone() -> Iterator[Ranks]:
    """This process as the only rank of a run."""
    with temporary_folder() as folder:
        yield Ranks(0, 1, 0, 1, f"file://{folder}/store")


@contextmanager
def set_variables(values: dict[str, str]) -> Iterator[None]:
    """Sets those that are not set already."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def loopback() -> Iterator[None]:
    """For ranks that are all on this machine, unless the user has chosen an interface."""
    with set_variables(loopback_variables()):
        yield


def loopback_variables() -> dict[str, str]:
    names = [name for _, name in socket.if_nameindex()]
    interface = next((name for name in LOOPBACK if name in names), None)
    return dict.fromkeys(INTERFACES, interface) if interface else {}
