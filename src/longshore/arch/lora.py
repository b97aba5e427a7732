"""LoRA as data: which linear layers of a decoder get low-rank factors, and how large. No torch.

In: a rank, an alpha, names of modules. Out: a LoRAConfig, part of a DecoderConfig. A layer whose
weight is W (F, C) then computes x·Wᵀ + alpha / rank · (x·Aᵀ)·Bᵀ with A (rank, C) and B (F, rank);
only factors are trained. A name is the end of a module's name, at a dot:

    config = LoRAConfig(rank=8, alpha=16, targets=("q_proj", "layers.0.mlp.up_proj"))
    config.scale                                              2.0
    config.matches("layers.3.mixer.q_proj")                   True
    config.matches("layers.3.mlp.up_proj")                    False
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from longshore.arch.checks import check_counts, check_more_than
from longshore.arch.part import Product

ALL_LINEAR = "all-linear"
"""As a target: all linear layers of mixers and feed-forward parts."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Low-rank factors beside the weights of linear layers."""

    rank: int
    """Rows of A, columns of B."""
    alpha: float
    """Factors' products are multiplied by alpha / rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Ends of modules' names."""

    def __post_init__(self) -> None:
        check_counts(self, "rank")
        check_more_than(0, self, "alpha")
        if not self.targets:
            raise ValueError("LoRAConfig.targets is empty; name modules, such as q_proj")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def matches(self, module: str) -> bool:
        """Whether a linear layer of this name, in a mixer or feed-forward part, is a target."""
        return any(
            target == ALL_LINEAR or f".{module}".endswith(f".{target}") for target in self.targets
        )

    def factors(self, products: Iterable[Product]) -> tuple[Product, ...]:
        """The products of factors beside these products, two for each that has some."""
        targets = (each for each in products if self.adapts(each.name))
        pairs = ((Product(each.k, self.rank), Product(self.rank, each.n)) for each in targets)
        return tuple(chain.from_iterable(pairs))

    def adapts(self, name: str) -> bool:
        """Whether a linear layer of this name below its part is a target in any layer.

        name: such as q_proj; "" for what can have no factors.
        """
        ends = (re.sub(r"^(.*\.)?(mixer|mlp)\.", "", target) for target in self.targets)
        return bool(name) and replace(self, targets=tuple(ends)).matches(name)
