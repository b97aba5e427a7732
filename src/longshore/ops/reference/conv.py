"""The twin of ops/conv.py: sequence by sequence, row by row, tap by tap."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from longshore.ops.boundaries import Bounds, offsets_of


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None = None,
    *,
    bounds: Bounds | None = None,
    before: Tensor | None = None,
    activation: bool = False,
) -> Tensor:
    taps = weight_CK.shape[1]
    offsets = offsets_of(bounds, len(x_TC))
    rows = []
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        halo = x_TC.new_zeros(taps - 1, x_TC.shape[1]) if before is None else before[sequence]
        visible = torch.cat([halo, x_TC[start:stop]])
        for row in range(stop - start):
            y_C = (visible[row : row + taps] * weight_CK.T).sum(0)
            y_C = y_C if bias_C is None else y_C + bias_C
            rows.append(silu(y_C) if activation else y_C)
    return torch.stack(rows) if rows else x_TC
