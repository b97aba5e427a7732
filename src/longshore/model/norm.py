"""RMSNorm: each row divided by its root mean square, then scaled channel by channel.

In: (…, C). Out: the same shape and dtype. Half precision is normed in float32. The row [3, 4] has
root mean square sqrt(12.5), so with a weight of ones and no eps it becomes [0.849, 1.131].
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps:g}"
