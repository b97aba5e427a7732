"""A mixer in which each head sees the mean of its sequence so far. Pure Python.

In: numbers. Out: a frozen config, which is a Part. With 4 heads of 8 dims at width 64 it has
2·64·32 = 4,096 parameters.
"""

from dataclasses import dataclass
from typing import ClassVar

from longshore.arch.cuts import TensorCut, TPRank, TPUnits
from longshore.arch.part import Part, Product, Saved, causal_pairs
from longshore.settings import check_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMeanConfig(Part):
    """The mean of all tokens up to a token's own."""

    graph_layer: ClassVar[str] = "mean"
    timed_as: ClassVar[str] = "attention"

    heads: int
    """Heads that TP ranks divide."""
    head_dim: int
    """Width of a head."""

    def __post_init__(self) -> None:
        check_counts(self, "heads", "head_dim")

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_dim, self.inner

    def products(self, width: int) -> tuple[Product, ...]:
        return Product(width, self.inner, "in_proj"), Product(self.inner, width, "out_proj")

    def parameters(self, width: int) -> int:
        return 2 * width * self.inner

    def flops(self, width: int, length: int) -> int:
        return 2 * length * self.parameters(width) + 4 * self.inner * causal_pairs(length)

    def saved(self, width: int) -> Saved:
        """Scores of 0, values and their means."""
        return Saved(3 * self.inner, self.heads)

    def gathered(self) -> int:
        return self.inner

    def tp_units(self) -> tuple[TPUnits, ...]:
        return (TPUnits("heads", "heads of the mean", self.heads),)

    def tp_cuts(self, width: int, at: TPRank) -> dict[str, TensorCut]:
        return {
            "in_proj.weight": at.of(self.heads, self.head_dim),
            "out_proj.weight": at.of(self.heads, self.head_dim, dim=1),
        }
