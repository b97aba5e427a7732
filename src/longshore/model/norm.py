"""RMS norms, plain and with a gate, and parameters that are never cast.

In: (…, C), and for a gated norm the gate's rows. Out: the same shape and dtype. Half precision is
normed in float32. The row [3, 4] has root mean square sqrt(12.5), so with a weight of ones and no
eps it becomes [0.849, 1.131]; a zero-centred norm does the same with a weight of zeros. With a gate
so large that silu(gate) = gate = [g, g], NormAfterGate (Mamba2) gives [0.849, 1.131] whatever g is,
NormBeforeGate (gated delta net) [0.849·g, 1.131·g].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longshore.arch.part import Norm
from longshore.ops.pointwise import (
    add_norm,
    norm_after_gate,
    norm_before_gate,
    rms_norm,
    shared_norm_after_gate,
)
from longshore.ops.rope import norm_rotate_both


class RMSNorm(nn.Module):
    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.full((width,), 0.0 if norm.zero_centred else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.norm.eps, zero_centred=self.norm.zero_centred)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta, or x itself, and its norm in the weight's dtype."""
        return add_norm(x, delta, self.weight, self.norm.eps, zero_centred=self.norm.zero_centred)

    def rotated_with(
        self, k_norm: "RMSNorm", q_THD: Tensor, k_TKD: Tensor, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The norm of each head of q and, by k_norm, of k, rotated."""
        weights, eps, centred = (self.weight, k_norm.weight), self.norm.eps, self.norm.zero_centred
        return norm_rotate_both(q_THD, k_TKD, weights, eps, *table, zero_centred=centred)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.norm.eps:g}"


class Float32Parameters(nn.Module):
    """A module whose parameters keep their dtype while others are cast to that of the arithmetic.

    Decay rates are exponentiated and multiplied over a whole sequence: bfloat16, with 8 bits, would
    turn a decay of 0.999 into 1. Such a module holds no other parameters, and its forward returns
    new tensors made of them: parallel/fsdp.py wraps it on its own, and takes the gathered
    parameters away when forward returns.
    """


class NormAfterGate(nn.Module):
    """weight · norm(x · silu(gate)), each of `groups` parts of the channels normed apart.

    mean_over_ranks: of mean squares (…, 1), where ranks share the channels of one part; set by
    parallel/tensor.py.
    """

    mean_over_ranks: Callable[[Tensor], Tensor] | None = None

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if self.mean_over_ranks is not None:
            return shared_norm_after_gate(
                x, gate, self.weight, eps=self.eps, mean_over_ranks=self.mean_over_ranks
            )
        return norm_after_gate(x, gate, self.weight, groups=self.groups, eps=self.eps)


class NormBeforeGate(nn.Module):
    """weight · norm(x) · silu(gate) over the last dim."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return norm_before_gate(x, gate, self.weight, eps=self.eps)
