"""Attention by flash-attn-4, for half precision on Hopper GPUs.

In and out: as ops/attention_varlen.py. Values may be narrower than queries where the kernels know
the pair, as of MLA's 192 and 128. A block's values may include rows
of the next sequence, multiplied by 0: NaN or infinity there, unlike finite values, would spread.

Kernels are compiled at their first call, a few seconds for each width, head count ratio and mask.
"""

from typing import Any

from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from longshore.ops.attention import AttentionSpec
from longshore.ops.attention_varlen import aligned_rows

BLOCK_ROWS = 257
"""More than the rows of any block of the kernels."""


def forward(
    q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    rows = (aligned_rows(x) for x in (q_THD, k_SKD, v_SKV))
    out_THV, lse_HT, *_ = _flash_attn_fwd(*rows, return_lse=True, **_options(spec))
    return out_THV, lse_HT


def backward(
    grad_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = (aligned_rows(x) for x in (q_THD, k_SKD, v_SKV, out_THV, grad_THV))
    dq_THD, dk_SKD, dv_SKV, *_ = _flash_attn_bwd(*rows, lse_HT.contiguous(), **_options(spec))
    return dq_THD, dk_SKD, dv_SKV


def _options(spec: AttentionSpec) -> dict[str, Any]:
    """Masks are aligned at the end of queries and keys, as in Longshore."""
    mask: dict[str, Any] = {"causal": True}
    if spec.window is not None:
        mask = {"causal": False, "window_size_left": spec.window - 1, "window_size_right": 0}
    return {
        "cu_seqlens_q": spec.bounds.cu_seqlens,
        "cu_seqlens_k": spec.key_bounds.cu_seqlens,
        # Bounds from above. Sequences of one block would be compiled for on their own, in mid-run.
        "max_seqlen_q": max(spec.bounds.longest, BLOCK_ROWS),
        "max_seqlen_k": max(spec.key_bounds.longest, BLOCK_ROWS),
        "softmax_scale": spec.scale,
        **mask,
    }
