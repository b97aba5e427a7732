"""The default process group of a rank: opens it, closes it, and finds the other ranks.

In: a Rendezvous, a backend and the rank's device. Out: a default process group, open during a
`with` block. Rendezvous(1, 4, "file:///tmp/store") is the second of four ranks that find each other
through a file.

torchrun has one store for all its attempts (`--max-restarts`) and for all groups of a process, one
after another; new ranks would find the addresses of those before in it. So each group prefixes its
keys: `attempt_address` makes `env://` of attempt 1 `attempt://1`, and the store counts the ranks
that joined in it: of 4 ranks the first four have the prefix "attempt-1-0", the next four
"attempt-1-1".
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks find each other."""

    rank: int
    world_size: int
    address: str
    """Either env://, under torchrun, or file:///…"""


@contextmanager
def process_group(
    where: Rendezvous, *, backend: str, device: torch.device, timeout: timedelta | None = None
) -> Iterator[None]:
    """Opens the default group for the block. NCCL connects eagerly, so that CP groups can be split.

    timeout: of every collective in this group and in all groups created within the block.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process already has a default process group; close the other Trainer, or call "
            "torch.distributed.destroy_process_group(), before this one"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    excepthook = sys.excepthook  # torch replaces it, each time by one that calls the last
    with _default_timeout(timeout):
        dist.init_process_group(
            backend,
            init_method=where.address,
            rank=where.rank,
            world_size=where.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        if backend == "nccl":
            _name_ranks(device)
        try:
            yield
        except BaseException:
            # Groups that a failed rank shares cannot be destroyed, and its process ends.
            if where.world_size == 1:
                dist.destroy_process_group()
                sys.excepthook = excepthook
            raise
        dist.barrier()
        dist.destroy_process_group()
        sys.excepthook = excepthook


def _name_ranks(device: torch.device) -> None:
    """Gives the default group the list of its ranks, which `split_group` reads.

    torch assumes the list for the first group of a process only; splitting a later default group,
    as of a second training in a notebook, would crash.
    """
    options = distributed_c10d._get_default_group()._get_backend(device).options
    options.global_ranks_in_group = list(range(dist.get_world_size()))


@contextmanager
def _default_timeout(timeout: timedelta | None) -> Iterator[None]:
    """Changes torch's default timeout, which device meshes use."""
    before = {name: getattr(distributed_c10d, name) for name in DEFAULTS}
    for name in DEFAULTS if timeout is not None else ():
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


SCHEME = "attempt"


def attempt_address(address: str, attempt: int) -> str:
    """The address of a group of an attempt, 0 for the first; that of a file stays."""
    if address != "env://":
        return address
    with suppress(RuntimeError):  # already registered
        register_rendezvous_handler(SCHEME, _handler)
    return f"{SCHEME}://{attempt}"


def _handler(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:  # noqa: ANN401
    parts = urlparse(url)
    for store, rank, world_size in rendezvous(f"env://?{parts.query}", **options):
        joined = store.add(f"longshore-joined-{parts.netloc}", 1) - 1
        yield PrefixStore(f"attempt-{parts.netloc}-{joined // world_size}", store), rank, world_size
