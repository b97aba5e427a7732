"""Where the ranks of a restarted torchrun meet: apart from those that died.

In: the place torchrun gives, and how often it has restarted. Out: an address for
init_process_group. torchrun keeps one store for all its attempts, in which the second would find
the addresses of the first and wait for ranks that are gone; `env://` of attempt 1 is `attempt://1`,
which is the same store with a prefix.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlparse

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

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
