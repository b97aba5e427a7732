"""Attention by flash-attn-4, for half precision on Hopper GPUs.

In and out: as ops/attention.py, without defaults. Nothing is read back from the device: lengths
reach the kernels as `cu_seqlens` and, on the host, as `longest`. Values may be narrower than
queries where the kernels know the pair, as of MLA's 192 and 128.

Kernels are compiled at their first call, a few seconds for each width, head count ratio and mask.
"""

from typing import Any

from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from longshore.ops.boundaries import Bounds


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
        _rows(q_THD),
        _rows(k_SKD),
        _rows(v_SKV),
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
        _rows(q_THD),
        _rows(k_SKD),
        _rows(v_SKV),
        _rows(out_THV),
        _rows(grad_THV),
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
        "max_seqlen_q": bounds.longest,
        "max_seqlen_k": key_bounds.longest,
        "softmax_scale": scale,
        **mask,
    }


def _rows(x: Tensor) -> Tensor:
    """The kernels want rows that begin at multiples of 16 bytes; those of an expanded do not."""
    *strides, last = x.stride()
    is_aligned = last == 1 and all(stride % 8 == 0 and stride for stride in strides)
    return x if is_aligned and x.data_ptr() % 16 == 0 else x.contiguous()
