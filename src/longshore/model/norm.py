"""RMSNorm: each row divided by its root mean square, then scaled channel by channel.

In: (…, C). Out: the same shape and dtype. Half precision is normed in float32. The row [3, 4] has
root mean square sqrt(12.5), so with a weight of ones and no eps it becomes [0.849, 1.131]; a
zero-centred norm does the same with a weight of zeros.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from longshore.model.part import Norm


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
