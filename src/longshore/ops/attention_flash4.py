"""Attention by flash-attn-4, for half precision on Hopper GPUs.

In and out: as ops/attention.py, without defaults. Nothing is read back from the device: lengths
reach the kernels as `cu_seqlens` and, on the host, as `longest`. Values may be narrower than
queries where the kernels know the pair, as of MLA's 192 and 128. A block's values may include rows
of the next sequence, multiplied by 0: NaN or infinity there, unlike finite values, would spread.

Kernels are compiled at their first call, a few seconds for each width, head count ratio and mask.
"""

from typing import Any

from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from longshore.ops.attention_varlen import aligned_rows
from longshore.ops.boundaries import Bounds

BLOCK_ROWS = 257
"""More than the rows of any block of the kernels."""


def forward(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    *,
    bounds: Bounds,
    key_bounds: Bounds,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    out_THV, lse_HT, *_ = _flash_attn_fwd(
        aligned_rows(q_THD),
        aligned_rows(k_SKD),
        aligned_rows(v_SKV),
        return_lse=True,
        **_options(bounds, key_bounds, scale, window),
    )
    return out_THV, lse_HT


def backward(
    grad_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor,
    *,
    bounds: Bounds,
    key_bounds: Bounds,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq_THD, dk_SKD, dv_SKV, *_ = _flash_attn_bwd(
        aligned_rows(q_THD),
        aligned_rows(k_SKD),
        aligned_rows(v_SKV),
        aligned_rows(out_THV),
        aligned_rows(grad_THV),
        lse_HT.contiguous(),
        **_options(bounds, key_bounds, scale, window),
    )
    return dq_THD, dk_SKD, dv_SKV


def _options(
    bounds: Bounds, key_bounds: Bounds, scale: float, window: int | None
) -> dict[str, Any]:
    """Masks are aligned at the end of queries and keys, as in Longshore."""
    mask: dict[str, Any] = {"causal": True}
    if window is not None:
        mask = {"causal": False, "window_size_left": window - 1, "window_size_right": 0}
    return {
        "cu_seqlens_q": bounds.cu_seqlens,
        "cu_seqlens_k": key_bounds.cu_seqlens,
        # Bounds from above. Sequences of one block would be compiled for on their own, in mid-run.
        "max_seqlen_q": max(bounds.longest, BLOCK_ROWS),
        "max_seqlen_k": max(key_bounds.longest, BLOCK_ROWS),
        "softmax_scale": scale,
        **mask,
    }
