"""The twin of ops/delta_rule.py: sequence by sequence, token by token."""

from itertools import pairwise

import torch
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of


def gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    scale: float | None = None,
    bounds: Bounds | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, heads, keys = k_THK.shape
    scale = keys**-0.5 if scale is None else scale
    offsets = offsets_of(bounds, rows)
    outs, finals = [], []
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        zero = v_THV.new_zeros(heads, keys, v_THV.shape[2])
        S_HKV = zero if initial is None else initial[sequence]
        for t in range(start, stop):
            S_HKV = g_TH[t].exp()[:, None, None] * S_HKV
            stored_HV = (k_THK[t, :, :, None] * S_HKV).sum(1)
            update_HV = beta_TH[t, :, None] * (v_THV[t] - stored_HV)
            S_HKV = S_HKV + k_THK[t, :, :, None] * update_HV[:, None, :]
            outs.append((scale * q_THK[t, :, :, None] * S_HKV).sum(1))
        finals.append(S_HKV)
    return torch.stack(outs) if outs else v_THV, torch.stack(finals)


def delta_transition(
    k_THK: Tensor, g_TH: Tensor, beta_TH: Tensor, *, bounds: Bounds | None = None
) -> Tensor:
    offsets = offsets_of(bounds, len(k_THK))
    eye_KK = torch.eye(k_THK.shape[2], dtype=k_THK.dtype, device=k_THK.device)
    transitions = []
    for start, stop in pairwise(offsets):
        product_HKK = eye_KK.expand(k_THK.shape[1], -1, -1)
        for t in range(start, stop):
            outer_HKK = k_THK[t, :, :, None] * k_THK[t, :, None, :]
            one_HKK = g_TH[t].exp()[:, None, None] * (
                eye_KK - beta_TH[t, :, None, None] * outer_HKK
            )
            product_HKK = one_HKK @ product_HKK
        transitions.append(product_HKK)
    return torch.stack(transitions)
