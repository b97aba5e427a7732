"""Measures matrix products over a grid of rows × k × n, and copies on the device.

In: a timer and a dtype. Out: ProductTimes, and the seconds of a byte that a copy reads or writes.
A product is that of nn.Linear: x (rows, k) by a weight (n, k); backward are dy @ w and dy.T @ x.

    rows 256, k 64, n 64 on a CPU: forward 2e-5 s, backward 5e-5 s
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch.nn.functional import linear

from longshore.arch.product_times import ProductTime, ProductTimes
from longshore.calibrate.timing import Clock, Timer, free

SHORT = 2e-4
"""Seconds below which several products are timed together."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes to measure."""

    rows: tuple[int, ...]
    """Of the first factor."""
    widths: tuple[int, ...]
    """Values of k and of n."""
    copied: int
    """Numbers of the copy that bandwidth is measured with."""


GRIDS = {
    "cuda": Grid((64, 512, 2048, 8192, 32768), (64, 256, 1024, 2048, 4096, 12288), 1 << 28),
    "cuda quick": Grid((64, 1024, 8192, 32768), (64, 1024, 4096, 12288), 1 << 28),
    "cpu": Grid((16, 128, 512, 2048), (16, 64, 256, 1024), 1 << 24),
    "cpu quick": Grid((64, 512), (32, 256), 1 << 20),
}


def measure_products(timer: Timer, dtype: torch.dtype, grid: Grid, clock: Clock) -> ProductTimes:
    """All products of the grid."""
    times = []
    for rows in grid.rows:
        clock.tell(f"products of {rows:,} rows")
        for k, n in product(grid.widths, grid.widths):
            times.append(_measure(timer, dtype, rows, k, n))
        free(timer.device)
    flop = min(each.forward / (2 * each.rows * each.k * each.n) for each in times)
    return ProductTimes(origin="measured", flop=flop, grid=tuple(times))


def measure_copies(timer: Timer, dtype: torch.dtype, grid: Grid) -> float:
    """Seconds of a byte that is read or written."""
    source = torch.ones(grid.copied, dtype=dtype, device=timer.device)
    target = torch.empty_like(source)
    seconds = timer.seconds(lambda: target.copy_(source))
    return seconds / (2 * source.numel() * source.element_size())


def _measure(timer: Timer, dtype: torch.dtype, rows: int, k: int, n: int) -> ProductTime:
    x, dy, weight = (
        torch.randn(shape, device=timer.device).to(dtype)
        for shape in ((rows, k), (rows, n), (n, k))
    )

    def forward() -> None:
        linear(x, weight)

    def backward() -> None:
        torch.mm(dy, weight)
        torch.mm(dy.t(), x)

    return ProductTime(rows, k, n, _seconds(timer, forward), _seconds(timer, backward))


def _seconds(timer: Timer, function: Callable[[], object]) -> float:
    """Of one call; short ones are timed ten at a time on CUDA."""
    once = timer.seconds(function, warmup=1)
    if not timer.is_cuda or once > SHORT:
        return once

    def ten() -> None:
        for _ in range(10):
            function()

    return timer.seconds(ten, warmup=0) / 10
