"""RMS norms with a gate: after it (Mamba2) or before it (gated delta net).

In: rows and the gate's rows. Out: the same shape and dtype. Half precision is normed in float32.
The row [3, 4] with a gate so large that silu(gate) = gate = [g, g]: normed after the gate it is
[0.849, 1.131], whatever g is; before it [0.849·g, 1.131·g].
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class NormAfterGate(nn.Module):
    """weight · norm(x · silu(gate)), each of `groups` parts of the channels normed apart."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = _wide(x)
        gated = torch.unflatten(wide * functional.silu(_wide(gate)), -1, (self.groups, -1))
        normed = functional.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(-2)
        return (normed * self.weight.to(wide.dtype)).to(x.dtype)


class NormBeforeGate(nn.Module):
    """weight · norm(x) · silu(gate) over the last dim."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = _wide(x)
        weight = self.weight.to(wide.dtype)
        normed = functional.rms_norm(wide, weight.shape, weight, self.eps)
        return (normed * functional.silu(_wide(gate))).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
