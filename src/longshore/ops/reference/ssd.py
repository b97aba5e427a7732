"""The twin of ops/ssd.py: sequence by sequence, token by token."""

from itertools import pairwise

import torch
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of


def ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    *,
    D_H: Tensor | None = None,
    bounds: Bounds | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, heads, width = x_THP.shape
    group_of_head = [head * B_TGN.shape[1] // heads for head in range(heads)]
    B_THN, C_THN = B_TGN[:, group_of_head], C_TGN[:, group_of_head]
    offsets = offsets_of(bounds, rows)
    outs, finals = [], []
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        zero = x_THP.new_zeros(heads, width, B_TGN.shape[2])
        h_HPN = zero if initial is None else initial[sequence]
        for t in range(start, stop):
            fading = (dt_TH[t] * A_H).exp()[:, None, None]
            h_HPN = fading * h_HPN + (dt_TH[t, :, None] * x_THP[t])[:, :, None] * B_THN[t, :, None]
            y_HP = (h_HPN * C_THN[t, :, None]).sum(-1)
            outs.append(y_HP if D_H is None else y_HP + D_H[:, None] * x_THP[t])
        finals.append(h_HPN)
    return torch.stack(outs) if outs else x_THP, torch.stack(finals)


def ssd_transition(dt_TH: Tensor, A_H: Tensor, *, bounds: Bounds | None = None) -> Tensor:
    offsets = offsets_of(bounds, len(dt_TH))
    return torch.stack(
        [(dt_TH[start:stop] * A_H).exp().prod(0) for start, stop in pairwise(offsets)]
    )
