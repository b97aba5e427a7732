"""Attention sequence by sequence, with a full mask: the twin of ops/attention.py.

In and out: as there, differentiable by plain autograd. With 2 queries over 3 keys the mask is
[1 1 0], [1 1 1]; with window 2 it is [1 1 0], [0 1 1].
"""

import torch
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of


def attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    *,
    bounds: Bounds | None = None,
    key_bounds: Bounds | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return attention_forward(
        q_THD,
        k_SKD,
        v_SKV,
        bounds=bounds,
        key_bounds=key_bounds,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )[0]


def attention_forward(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    *,
    bounds: Bounds | None = None,
    key_bounds: Bounds | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (T, H, V) and the log-sum-exp (H, T)."""
    shared = q_THD.shape[1] // k_SKD.shape[1]
    k_SHD, v_SHV = k_SKD.repeat_interleave(shared, 1), v_SKV.repeat_interleave(shared, 1)
    scale = q_THD.shape[2] ** -0.5 if scale is None else scale
    rows = offsets_of(bounds, len(q_THD))
    keys = offsets_of(bounds if key_bounds is None else key_bounds, len(k_SKD))
    outs, lses = [], []
    for i in range(len(rows) - 1):
        q = q_THD[rows[i] : rows[i + 1]]
        k, v = k_SHD[keys[i] : keys[i + 1]], v_SHV[keys[i] : keys[i + 1]]
        scores_Hnm = torch.einsum("nhd,mhd->hnm", q, k) * scale
        if softcap is not None:
            scores_Hnm = softcap * torch.tanh(scores_Hnm / softcap)
        visible_nm = _visible(len(q), len(k), window).to(q.device)
        scores_Hnm = scores_Hnm.masked_fill(~visible_nm, -torch.inf)
        if sinks is not None:
            # A key more, whose value is 0.
            column_Hn1 = sinks[:, None, None].expand(-1, len(q), 1)
            scores_Hnm = torch.cat([scores_Hnm, column_Hn1], 2)
            v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
        outs.append(torch.einsum("hnm,mhv->nhv", scores_Hnm.softmax(2), v))
        lses.append(scores_Hnm.logsumexp(2))
    return torch.cat(outs), torch.cat(lses, 1)


def _visible(queries: int, keys: int, window: int | None) -> Tensor:
    """Query j is the token keys − queries + j of its sequence."""
    back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (back >= 0) & (back < (keys if window is None else window))
