"""Seconds of matrix products on one machine, interpolated between measured ones. Pure Python.

In: a full grid of rows × k × n, each with the seconds of its forward and of its two backward
products. Out: the seconds of any product. Between points the logarithms are linear in the
logarithms of rows, k and n; beyond the largest a product runs at the rate of the largest; below the
smallest it takes as long as the smallest.

    a grid of rows 100 and 400 at k = n = 64 that takes 1 and 4 ms: 200 rows take 2 ms, 800 take 8,
    50 take 1
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

Origin = Literal["measured", "derived", "arithmetic"]
"""derived: measured on another machine, and scaled by the ratio of two data sheets."""
Corner = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ProductTime:
    """One product of (rows, k) and (k, n)."""

    rows: int
    """Of the first factor: tokens."""
    k: int
    """Numbers that are summed over."""
    n: int
    """Columns of the result."""
    forward: float
    """Seconds of the product."""
    backward: float
    """Seconds of the gradients of both factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """All measured products; without any, every product runs at one rate."""

    origin: Origin
    """Where the numbers come from."""
    flop: float
    """Seconds of a FLOP in the fastest product."""
    grid: tuple[ProductTime, ...] = ()
    """Every combination of some rows, k and n, once; () for none."""
    _axes: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)
    """The sizes of rows, k and n in the grid, ascending."""
    _logs: dict[Corner, tuple[float, float]] = field(init=False, compare=False, repr=False)
    """Logarithms of both times of each product."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.flop) and self.flop > 0):
            raise ValueError(f"products: flop is {self.flop}; it must be a number above 0")
        points = [(each.rows, each.k, each.n) for each in self.grid]
        axes = tuple(tuple(sorted(set(sizes))) for sizes in zip(*points, strict=True))
        if len(points) != len(set(points)) or len(points) != math.prod(map(len, axes or [()])):
            raise ValueError(
                f"products: the grid has {len(points)} products; it must have every combination "
                "of its rows, k and n once"
            )
        if bad := [each for each in self.grid if min(each.forward, each.backward) <= 0]:
            raise ValueError(f"products: {bad[0]} takes no time; remove it, or measure again")
        logs = {
            point: (math.log(each.forward), math.log(each.backward))
            for point, each in zip(points, self.grid, strict=True)
        }
        object.__setattr__(self, "_axes", axes)
        object.__setattr__(self, "_logs", logs)

    def seconds(self, rows: float, k: int, n: int) -> tuple[float, float]:
        """Of the forward product, and of both backward products."""
        flops = 2.0 * rows * k * n
        if not self.grid:
            return flops * self.flop, 2 * flops * self.flop
        if not flops:
            return 0.0, 0.0
        ways, scale = [], 1.0
        for size, axis in zip((rows, k, n), self._axes, strict=True):
            scale *= max(1.0, size / axis[-1])
            ways.append(_between(axis, min(max(size, axis[0]), axis[-1])))
        forward = backward = 0.0
        for corner in product(*ways):
            weight = math.prod(share for _, share in corner)
            first, second = self._logs[tuple(at for at, _ in corner)]  # type: ignore[index]
            forward += weight * first
            backward += weight * second
        return math.exp(forward) * scale, math.exp(backward) * scale


def _between(axis: Sequence[int], size: float) -> list[tuple[int, float]]:
    """The neighbours of a size on an axis, each with its share in logarithms."""
    place = bisect_right(axis, size)
    low = axis[place - 1]
    if low == size or place == len(axis):
        return [(low, 1.0)]
    share = math.log(size / low) / math.log(axis[place] / low)
    return [(low, 1 - share), (axis[place], share)]
