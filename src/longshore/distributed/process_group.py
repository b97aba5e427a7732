"""The default process group of a rank, from the first to the last of its collectives.

In: the rank's place, a backend, its device. Out: an open default group, closed at the end.
Rendezvous(1, 4, "file:///tmp/store") is the second of four ranks that find each other in a file.

torchrun keeps one store for all its attempts, in which the second would find the addresses of the
first and wait for ranks that are gone; so `env://` of attempt 1 is `attempt://1`, which is the same
store with a prefix.
"""

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
    """address: "env://" under torchrun, or "file:///…"."""

    rank: int
    world_size: int
    address: str


@contextmanager
def process_group(
    where: Rendezvous, *, backend: str, device: torch.device, timeout: timedelta | None = None
) -> Iterator[None]:
    """NCCL connects at once, so that CP groups can be split off it.

    timeout: of every collective in this group and in all that are formed within the block.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _default_timeout(timeout):
        dist.init_process_group(
            backend,
            init_method=where.address,
            rank=where.rank,
            world_size=where.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        yield
        # Only after success: a failed rank's groups cannot be taken down, and the process ends.
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def _default_timeout(timeout: timedelta | None) -> Iterator[None]:
    """A group takes torch's default where none is named, and meshes name none."""
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
    """attempt: 0 is the first, which needs nothing."""
    if address != "env://" or attempt == 0:
        return address
    with suppress(RuntimeError):  # it is known already
        register_rendezvous_handler(SCHEME, _handler)
    return f"{SCHEME}://{attempt}"


def _handler(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:  # noqa: ANN401
    parts = urlparse(url)
    for store, rank, world_size in rendezvous(f"env://?{parts.query}", **options):
        yield PrefixStore(f"attempt-{parts.netloc}", store), rank, world_size
