"""RMS norms, plain and with a gate, and parameters that are never cast.

In: (…, C), and for a gated norm the gate's rows. Out: the same shape and dtype. Half precision is
normed in float32. The row [3, 4] has root mean square sqrt(12.5), so with a weight of ones and no
eps it becomes [0.849, 1.131]; a zero-centred norm does the same with a weight of zeros. With a gate
so large that silu(gate) = gate = [g, g], NormAfterGate (Mamba2) gives [0.849, 1.131] whatever g is,
NormBeforeGate (gated delta net) [0.849·g, 1.131·g].
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from longshore.arch.part import Norm
from longshore.ops.gated_norm import norm_after_gate, norm_before_gate


class RMSNorm(nn.Module):
    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.full((width,), 0.0 if norm.zero_centred else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.norm.zero_centred:
            weight = self.weight.to(torch.promote_types(self.weight.dtype, x.dtype))
            return functional.rms_norm(x, weight.shape, weight, self.norm.eps)
        # In float32 at least: in bfloat16 a small weight would be lost beside 1.
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1.0 + self.weight.to(wide)
        return functional.rms_norm(x.to(wide), scale.shape, scale, self.norm.eps).to(x.dtype)

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
    """weight · norm(x · silu(gate)), each of `groups` parts of the channels normed apart."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return norm_after_gate(x, gate, self.weight, groups=self.groups, eps=self.eps)


class NormBeforeGate(nn.Module):
    """weight · norm(x) · silu(gate) over the last dim."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return norm_before_gate(x, gate, self.weight, eps=self.eps)
