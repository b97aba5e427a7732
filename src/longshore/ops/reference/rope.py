"""Rotary position embeddings as a product of complex numbers: the twin of ops/rope.py.

In and out: as there. (1, 3) is 1 + 3i; rotated by 90°, times i, it is −3 + 1i.
"""

import torch
from torch import Tensor


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    dtype = torch.promote_types(x_THD.dtype, torch.float32)
    half = cos_TR.shape[1]
    x = x_THD.to(dtype)
    pairs_THR = torch.complex(x[..., :half], x[..., half : 2 * half])
    angles_T1R = torch.complex(cos_TR.to(dtype), sin_TR.to(dtype))[:, None]
    rotated_THR = pairs_THR * angles_T1R
    return torch.cat([rotated_THR.real, rotated_THR.imag, x[..., 2 * half :]], 2).to(x_THD.dtype)
