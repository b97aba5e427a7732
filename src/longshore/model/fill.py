"""First values of a tensor, row by row, alike however its rows are cut.

In: the tensor's name and shape, a range of rows, a seed. Out: those rows in float32 on the CPU.
Rows are made in blocks of about 2¹⁸ values, each from a generator of its own, seeded from (seed,
name, block): a rank makes the blocks its rows lie in and no other.

A (4096, 4096) weight has blocks of 64 rows. Rows 100…200 lie in blocks 1, 2 and 3; rows 36…136 of
those 192 are returned.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_VALUES = 1 << 18


@dataclass(frozen=True, slots=True)
class Fill:
    """How a parameter begins: a constant, or normal with `std` times the decoder's init_std.

    residual: what a block adds to the residual stream, made smaller by sqrt(2·layers), so that
    the stream's size at the end does not grow with the number of layers. norm: the weight of a
    norm, which begins at 0 where the decoder's norms are zero-centred.
    """

    std: float = 1.0
    constant: float | None = None
    residual: bool = False
    norm: bool = False


NORMAL = Fill()
RESIDUAL = Fill(residual=True)
ONES = Fill(constant=1.0)
NORM = Fill(constant=1.0, norm=True)
ZEROS = Fill(constant=0.0)


def fill_rows(
    name: str,
    shape: Sequence[int],
    start: int,
    stop: int,
    *,
    seed: int,
    std: float = 0.0,
    constant: float = 0.0,
) -> Tensor:
    """Rows start…stop of the tensor of that shape: normal around `constant`, or it for std 0."""
    if not 0 <= start <= stop <= shape[0]:
        raise ValueError(f"rows {start} to {stop} of {name} are not among its {shape[0]}")
    rest = tuple(shape[1:])
    if start == stop or not std:
        return torch.full((stop - start, *rest), constant)
    rows = max(1, BLOCK_VALUES // max(1, math.prod(rest)))
    first = start // rows
    blocks = []
    for block in range(first, -(-stop // rows)):
        count = min(rows, shape[0] - block * rows)
        generator = torch.Generator().manual_seed(_seed_of(seed, name, block))
        blocks.append(torch.randn(count, *rest, generator=generator))
    made = torch.cat(blocks)[start - first * rows : stop - first * rows]
    return made.mul_(std).add_(constant)


def _seed_of(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed} {name} {block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
