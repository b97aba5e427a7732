"""Where each of several joined sequences begins and ends, as the ops need it.

In: rows of joined sequences. Out: the protocol `Bounds`, which batch.Boundaries satisfies. Two
sequences of 3 and 5 tokens have offsets (0, 3, 8), cu_seqlens [0, 3, 8] as int32 on the device, and
longest 5. An op that gets None instead treats all rows as one sequence. To an op a sequence is any
span of rows: a lane's chunks of a longer sequence are sequences too.
"""

from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class Bounds(Protocol):
    """Sequences of rows, joined without gaps."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def cu_seqlens(self) -> Tensor: ...
    @property
    def longest(self) -> int: ...


def offsets_of(bounds: Bounds | None, rows: int) -> tuple[int, ...]:
    """The offsets on the host, checked against the number of rows."""
    if bounds is None:
        return (0, rows)
    if bounds.offsets[0] != 0 or bounds.offsets[-1] != rows:
        raise ValueError(
            f"the boundaries go from {bounds.offsets[0]} to {bounds.offsets[-1]}, "
            f"but there are {rows} rows; they must cover all rows"
        )
    return bounds.offsets


def to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Copies numbers to a device, from page-locked memory so that the host does not wait."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
