"""Linear layers with low-rank factors beside their weight (LoRA).

In: x (…, C). Out: x·Wᵀ + bias + scale · (x·Aᵀ)·Bᵀ, with W (F, C), A (R, C) and B (F, R). The weight
keeps its name and its place; factors are lora.a and lora.b below the module:

    linear = nn.Linear(4, 3)
    adapt(linear, LowRank(4, 3, rank=2, scale=2.0))     linear.lora.a (2, 4), linear.lora.b (3, 2)
    linear(x)                                           as before, while lora.b is 0
    whole_weight(linear)                                W + 2·B·A, for those who read the weight

With a rank of 8 at width 4096 a row costs 8·(4096 + 4096) products beside 4096·4096, 1/256.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class LowRank(nn.Module):
    """a: (R, C). b: (F, R), first 0."""

    def __init__(self, inputs: int, outputs: int, *, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.normal_(self.a, std=(3 * inputs) ** -0.5)

    def forward(self, base: Tensor, x: Tensor) -> Tensor:
        """base: what the weight makes of x."""
        return self.onto(base, functional.linear(x, self.a))

    def onto(self, base: Tensor, inner: Tensor) -> Tensor:
        """inner: (…, R), what a makes of the input."""
        inner = inner * self.scale
        if base.dim() == 2:
            return torch.addmm(base, inner, self.b.t())
        return base + functional.linear(inner, self.b)

    def product(self) -> Tensor:
        """scale · B·A: (F, C)."""
        return (self.b * self.scale) @ self.a


class AdaptedLinear(nn.Linear):
    """lora: the factors."""

    lora: LowRank

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lora(super().forward(x), x)
        return output


def whole_weight(linear: nn.Linear) -> Tensor:
    """The weight, with its factors' product where it has some."""
    lora = getattr(linear, "lora", None)
    if not isinstance(lora, LowRank):
        return linear.weight
    return linear.weight + lora.product()


def adapt(linear: nn.Linear, lora: LowRank, kind: type[nn.Linear] = AdaptedLinear) -> None:
    """Puts factors beside the weight, in place; kind: the class whose forward uses them."""
    linear.lora = lora
    linear.__class__ = kind
