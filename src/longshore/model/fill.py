"""First values of a tensor, row by row, alike however it is cut.

In: the tensor's name and shape, a range of rows, a seed. Out: those rows in float32 on the CPU, or
some of their columns.
Rows are made in blocks of about 2¹⁸ values, each from a generator of its own, seeded from (seed,
name, block): a rank makes only the blocks that contain its rows.

A (4096, 4096) weight has blocks of 64 rows. Rows 100:200 are in blocks 1, 2 and 3; rows 36:136 of
those 192 are returned.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_VALUES = 1 << 18


@dataclass(frozen=True, slots=True)
class Fill:
    """The first values of a parameter: constant, or normal around 0."""

    std: float = 1.0
    """Times the decoder's init_std."""
    constant: float | None = None
    """Instead of normal values."""
    residual: bool = False
    """What a block adds to the residual stream: smaller by sqrt(2·layers), so that the stream's
    size at the end does not grow with the number of layers."""
    norm: bool = False
    """The weight of a norm, which begins at 0 where the decoder's norms are zero-centred."""
    own_std: float | None = None
    """A std that does not follow the decoder's."""
    by_row: Callable[[Tensor, int], Tensor] | None = None
    """A function of rows' numbers and of how many there are."""
    experts: int = 0
    """Each row chooses distinct ones of this many experts; 0: it is no choice of experts."""


def _decay_rates(row: Tensor, count: int) -> Tensor:
    """Logs of rates from 1 to 16, evenly."""
    return (1 + 15 * (row + 0.5) / count).log()


def _step_biases(row: Tensor, count: int) -> Tensor:
    """What softplus makes steps from 0.001 to 0.1 of, even in their logs.

    Spread by the golden ratio, so that heads of like rates have unlike steps.
    """
    share = (row + 0.5) * (5**0.5 - 1) / 2 % 1
    step = 0.001 * 100**share
    return step + (-torch.expm1(-step)).log()


NORMAL = Fill()
RESIDUAL = Fill(residual=True)
ONES = Fill(constant=1.0)
NORM = Fill(constant=1.0, norm=True)
ZEROS = Fill(constant=0.0)
CONV = Fill(own_std=0.29)
"""As wide as torch begins a convolution of 4 taps."""
DECAY_RATES = Fill(by_row=_decay_rates)
STEP_BIASES = Fill(by_row=_step_biases)
"""Of mixers that carry a state."""


def fill_rows(
    name: str,
    shape: Sequence[int],
    rows: slice,
    *,
    seed: int,
    std: float = 0.0,
    constant: float = 0.0,
    rest: Sequence[slice] = (),
) -> Tensor:
    """These rows of the tensor of that shape: normal around `constant`, or it for std 0.

    rest: ranges of the dims after the first; default: all of them.
    """
    start, stop = rows.start, rows.stop
    if not 0 <= start <= stop <= shape[0]:
        raise ValueError(f"rows {start} to {stop} of {name} do not exist; it has {shape[0]} rows")
    width = tuple(shape[1:])
    columns = (slice(None), *rest)
    if start == stop or not std:
        return torch.full((), constant).expand(stop - start, *width)[columns].clone()
    each = max(1, BLOCK_VALUES // max(1, math.prod(width)))
    first = start // each
    blocks = []
    for block in range(first, -(-stop // each)):
        count = min(each, shape[0] - block * each)
        digest = hashlib.sha256(f"{seed} {name} {block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        blocks.append(torch.randn(count, *width, generator=generator)[columns])
    values = torch.cat(blocks)[start - first * each : stop - first * each]
    return values.mul_(std).add_(constant)
