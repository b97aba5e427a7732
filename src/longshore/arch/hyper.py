"""Hyper-connections: several residual rows a token, and what mixing them costs. Pure Python.

In: numbers. Out: a frozen config, checked. With `count` residuals of width C the rows between
blocks are count·C wide. Before a mixer or feed-forward part they are collapsed into one row of C,
and its output is added to all of them, while they are mixed by a doubly stochastic matrix; all
weights of this are made from the rows of the token (model/hyper_connection.py).

    HyperConfig(count=4)

At width 4096 each part has (2·4 + 4²)·(4·4096 + 1) + 3 = 393,243 parameters of that, and a token
takes 2·24·4·4096 FLOPs for the weights and 2·(4² + 2·4)·4096 for the mixing: 983,040 forward.
"""

from dataclasses import dataclass

from longshore.arch.checks import check_counts, check_more_than
from longshore.arch.part import Product, Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConfig:
    """Manifold-constrained hyper-connections, as in DeepSeek-V4."""

    count: int
    """Residual rows of each token."""
    iterations: int = 20
    """Of Sinkhorn's algorithm, which makes the mixing matrix doubly stochastic."""
    eps: float = 1e-6
    """Added to weights and divisors."""

    def __post_init__(self) -> None:
        check_counts(self, "count", "iterations")
        check_more_than(0, self, "eps")

    @property
    def weights(self) -> int:
        """Of a token at one part: to collapse, to expand, and the mixing matrix."""
        return (2 + self.count) * self.count

    def parameters(self, width: int) -> int:
        """Of one part: a projection, its bias, and a scale for each kind of weights."""
        return self.weights * (self.count * width + 1) + 3

    def collapse_parameters(self, width: int) -> int:
        """Of a collapse alone, before the last norm."""
        return self.count * (self.count * width + 1) + 1

    def products(self, width: int) -> tuple[Product, ...]:
        """Of one part."""
        return (Product(self.count * width, self.weights),)

    def flops(self, width: int) -> int:
        """Forward, of one token at one part."""
        (projected,) = self.products(width)
        return projected.flops + 2 * self.weights * width

    def collapse_flops(self, width: int) -> int:
        """Forward, of one token before the last norm."""
        return 2 * self.count * self.count * width + 2 * self.count * width

    def saved(self, width: int) -> Saved:
        """At one part, besides the rows that come: its output, and the weights in float32.

        Each half iteration of Sinkhorn's algorithm saves the matrix and its sums. As kernels do it:
        plain torch keeps the rows in float32 as well, where they are bfloat16.
        """
        sinkhorn = 2 * self.iterations * (self.count + 1) * self.count
        return Saved(width, 4 * self.weights + sinkhorn + 2)

    def collapse_saved(self, width: int) -> Saved:
        """Before the last norm, with the rows that come."""
        return Saved(self.count * width, 4 * self.count + 2)
