"""Rotary position embeddings: rotates pairs of a head's dims by the angles of a token's position.

In: x (T, H, D), and the cosines and sines (T, R) of each token's angles, 2R ≤ D. Out: x with its
first 2R dims rotated, dim i together with dim i + R, and the rest unchanged. Computed in float32 at
least, returned in x's dtype.

D = 5, R = 2, angles 90° and 0°: (1, 2, 3, 4, 5) becomes (−3, 2, 1, 4, 5); the pair (1, 3) rotates
to (−3, 1).
"""

import torch
from torch import Tensor


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """x with its first 2R dims rotated."""
    tokens, _, width = x_THD.shape
    half = cos_TR.shape[-1]
    if cos_TR.shape != (tokens, half) or sin_TR.shape != cos_TR.shape or 2 * half > width:
        raise ValueError(
            f"x is {tuple(x_THD.shape)}, the tables are {tuple(cos_TR.shape)} and "
            f"{tuple(sin_TR.shape)}; they need x's {tokens} rows and at most {width // 2} columns"
        )
    dtype = torch.promote_types(x_THD.dtype, torch.float32)
    cos_T1R, sin_T1R = cos_TR.to(dtype).unsqueeze(1), sin_TR.to(dtype).unsqueeze(1)
    first_THR = x_THD[..., :half].to(dtype)
    second_THR = x_THD[..., half : 2 * half].to(dtype)
    parts = (
        (first_THR * cos_T1R - second_THR * sin_T1R).to(x_THD.dtype),
        (second_THR * cos_T1R + first_THR * sin_T1R).to(x_THD.dtype),
        x_THD[..., 2 * half :],
    )
    return torch.cat(parts, dim=2)
