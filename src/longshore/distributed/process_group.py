"""Ranks: the rank of a process in its run, where all ranks meet, and their default process group.

In: what torchrun says in the environment, or what our launcher decides. Out: a Ranks, and a default
process group that is open during a `with` block. The second of four local ranks is

    Ranks(1, 4, 1, 4, "file:///tmp/longshore-x/store")

and under torchrun the last is "env://": what init_process_group takes as init_method. The commands
ask for ranks before torch is imported, so torch is imported only where a group is opened.

torchrun has one store for all its attempts (`--max-restarts`) and for all groups of a process, one
after another; new ranks would find the addresses of those before in it. So each group of an attempt
prefixes its keys, and the store counts the ranks that joined: of 4 ranks the first four have the
prefix "attempt-1-0", the next four "attempt-1-1".
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from longshore.files import temporary_folder

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = ("lo", "lo0")
TIMEOUT = timedelta(minutes=10)
DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process of a run."""

    rank: int
    """This process's rank, from 0."""
    world_size: int
    """Processes of the run."""
    local_rank: int
    """Its rank among the processes of its machine."""
    local_size: int
    """Processes of this machine."""
    rendezvous: str
    """Where they meet: env://, under torchrun, or file:///…"""


def ranks_from_environment() -> Ranks | None:
    """This process's rank if torchrun started it."""
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
def loopback(ranks: Ranks | None = None) -> Iterator[None]:
    """Ranks talk over the loopback, unless the user has chosen an interface.

    ranks: nothing changes if they are not all on this machine; None: they are.
    """
    is_one_machine = ranks is None or ranks.local_size == ranks.world_size
    with set_variables(loopback_variables() if is_one_machine else {}):
        yield


def loopback_variables() -> dict[str, str]:
    names = [name for _, name in socket.if_nameindex()]
    interface = next((name for name in LOOPBACK if name in names), None)
    return dict.fromkeys(INTERFACES, interface) if interface else {}


@contextmanager
def process_group(
    ranks: Ranks,
    *,
    backend: str,
    device: "torch.device",
    timeout: timedelta = TIMEOUT,
    attempt: int | None = None,
) -> Iterator[None]:
    """Opens the default group for the block. NCCL connects eagerly, so that CP groups can be split.

    timeout: for every collective in this group and in all groups created within the block. attempt:
    torchrun's, from 0; None: the only group in torchrun's store.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        raise ValueError(
            "this process already has a default process group; close the other Trainer, or call "
            "torch.distributed.destroy_process_group(), before this one"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_shared = attempt is not None and ranks.rendezvous == "env://"
    excepthook = sys.excepthook  # torch replaces it, each time by one that calls the last
    with _default_timeout(timeout):
        dist.init_process_group(
            backend,
            init_method=None if is_shared else ranks.rendezvous,
            store=_store_of_attempt(ranks, attempt, timeout) if is_shared else None,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        if backend == "nccl":
            _name_ranks(device)
        try:
            yield
        except BaseException:
            # Groups that a failed rank shares cannot be destroyed, and its process ends.
            if ranks.world_size == 1:
                dist.destroy_process_group()
                sys.excepthook = excepthook
            raise
        dist.barrier()
        dist.destroy_process_group()
        sys.excepthook = excepthook


def _store_of_attempt(ranks: Ranks, attempt: int | None, timeout: timedelta) -> "Store":
    """torchrun's store, with a prefix that no group before has used."""
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout))
    store.set_timeout(timeout)
    group = (store.add(f"longshore-joined-{attempt}", 1) - 1) // ranks.world_size
    return PrefixStore(f"attempt-{attempt}-{group}", store)


def _name_ranks(device: "torch.device") -> None:
    """Gives the default group the list of its ranks, which `split_group` reads.

    torch assumes the list for the first group of a process only; splitting a later default group,
    as of a second training in a notebook, would crash.
    """
    from torch.distributed import distributed_c10d, get_world_size

    options = distributed_c10d._get_default_group()._get_backend(device).options
    options.global_ranks_in_group = list(range(get_world_size()))


@contextmanager
def _default_timeout(timeout: timedelta) -> Iterator[None]:
    """Changes torch's default timeout, which device meshes use."""
    from torch.distributed import distributed_c10d

    before = {name: getattr(distributed_c10d, name) for name in DEFAULTS}
    for name in DEFAULTS:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)
