"""Attention by the flash kernels inside torch, for half precision on CUDA.

In and out: as ops/attention.py, with all options in one AttentionSpec. Nothing is read back from
the device: lengths reach the kernels as `cu_seqlens` and, on the host, as `longest`.

torch's windows are (left, right): a token and all before it is (−1, 0), window 3 is (2, 0). Queries
and keys of different lengths are aligned at their end, as in Longshore. Values narrower than the
queries are padded with zeros, and the output and the gradients cut to their width.
"""

from typing import Any

import torch
import torch.nn.attention.varlen  # registers the ops below
from torch import Tensor
from torch.nn.functional import pad

from longshore.ops.attention import AttentionSpec

_forward_op = torch.ops.torch_attn._varlen_attn.default
_backward_op = torch.ops.torch_attn._varlen_attn_backward.default
# torch 2.11 shares key heads by default and does not have this argument.
_GROUPED = {
    argument.name: True
    for argument in _forward_op._schema.arguments
    if argument.name == "enable_gqa"
}


def forward(
    q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    width = q_THD.shape[2]
    out_THD, lse_HT, _ = _forward_op(
        _rows(q_THD), _rows(k_SKD), _rows(v_SKV, width), *_lengths(spec), **_mask(spec), **_GROUPED
    )
    return out_THD[..., : v_SKV.shape[2]], lse_HT


def backward(
    grad_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    width = q_THD.shape[2]
    dq_THD, dk_SKD, dv_SKD = _backward_op(
        _rows(grad_THV, width),
        _rows(q_THD),
        _rows(k_SKD),
        _rows(v_SKV, width),
        _rows(out_THV, width),
        lse_HT.contiguous(),
        *_lengths(spec),
        # The random state of dropout, of which there is none.
        rng_state=torch.zeros(2, dtype=torch.uint64, device=q_THD.device),
        **_mask(spec),
    )
    return dq_THD, dk_SKD, dv_SKD[..., : v_SKV.shape[2]]


def _rows(x: Tensor, width: int | None = None) -> Tensor:
    if width is not None and width > x.shape[2]:
        return pad(x, (0, width - x.shape[2]))
    return aligned_rows(x)


def aligned_rows(x_THD: Tensor) -> Tensor:
    """Copied unless every head begins at a multiple of 16 bytes, of which the kernels read 16.

    Those of MLA's values may not, and those of an expanded gradient are not apart. Memory begins at
    such a multiple, and half precision has 8 numbers in it.
    """
    *strides, last = x_THD.stride()
    is_aligned = last == 1 and all(stride % 8 == 0 and stride for stride in strides)
    if is_aligned and x_THD.storage_offset() % 8 == 0:
        return x_THD
    return x_THD.clone(memory_format=torch.contiguous_format)


def _lengths(spec: AttentionSpec) -> tuple[Tensor, Tensor, int, int]:
    bounds, key_bounds = spec.bounds, spec.key_bounds
    # An upper bound is enough. At 1 the kernel swaps heads and rows in its results.
    longest = max(bounds.longest, 2), max(key_bounds.longest, 2)
    return bounds.cu_seqlens, key_bounds.cu_seqlens, *longest


def _mask(spec: AttentionSpec) -> dict[str, Any]:
    left = -1 if spec.window is None else spec.window - 1
    return {"is_causal": spec.window is None, "scale": spec.scale, "window_size": [left, 0]}
