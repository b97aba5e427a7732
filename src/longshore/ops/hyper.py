"""The rows of hyper-connections: projected to weights, collapsed into one row, mixed and expanded.

In: rows (T, N·C), N residuals of C channels after each other, and weights of each token. Out: what
model/hyper_connection.py makes of them; it describes what is computed.

    project     (T, M): the rows divided by their root mean square, times a weight (M, N·C)
    collapse    (T, C): Σ_n pre_n · x_n                          rows 1 and 3, pre ½ and ½: 2
    expand      (T, N·C): post_k · output + Σ_n mix_nk · x_n     output 5, post 1, mix ½: 7 and 7

On GPUs kernels read bfloat16 rows as they are. Plain torch makes a copy in float32, which is as
large as two of the rows and is kept for backward.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from longshore.ops.backends import pick


def project(rows_TS: Tensor, weight_MS: Tensor, *, eps: float) -> Tensor:
    """(T, M) in float32 at least. eps: added to the mean square."""
    kernels = pick("hyper-connections", rows_TS, weight_MS)
    if kernels is not None:
        projected: Tensor = kernels.project(rows_TS, weight_MS, eps)
        return projected
    wide_TS = _wide(rows_TS)
    inverse_T1 = torch.rsqrt(wide_TS.square().mean(1, keepdim=True) + eps)
    # Divided afterwards: the same, and one tensor less is kept.
    return linear(wide_TS, weight_MS.to(wide_TS.dtype)) * inverse_T1


def collapse(rows_TS: Tensor, pre_TN: Tensor) -> Tensor:
    """(T, C), in the rows' dtype."""
    kernels = pick("hyper-connections", rows_TS, pre_TN)
    if kernels is not None:
        collapsed: Tensor = kernels.collapse(rows_TS, pre_TN)
        return collapsed
    rows_TNC = _wide(rows_TS).unflatten(1, (pre_TN.shape[1], -1))
    row_T1C: Tensor = pre_TN[:, None, :] @ rows_TNC
    return row_T1C.sum(1).to(rows_TS.dtype)  # of one row; a view would not do, see `expand`


def expand(output_TC: Tensor, rows_TS: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
    """(T, N·C), in the rows' dtype. mix: from row n to row k."""
    dtype, count = rows_TS.dtype, post_TN.shape[1]
    kernels = pick("hyper-connections", rows_TS, post_TN)
    if kernels is not None:
        expanded: Tensor = kernels.expand(output_TC.to(dtype), rows_TS, post_TN, mix_TNN)
        return expanded
    rows_TNC = rows_TS.unflatten(1, (count, -1))
    added_TNC = post_TN.to(dtype)[:, :, None] * output_TC.to(dtype)[:, None, :]
    mixed_TNC: Tensor = mix_TNN.to(dtype).mT @ rows_TNC
    return added_TNC.flatten(1) + mixed_TNC.flatten(1)  # no view, which FSDP warns of


def _wide(rows_TS: Tensor) -> Tensor:
    return rows_TS.to(torch.promote_types(rows_TS.dtype, torch.float32))
