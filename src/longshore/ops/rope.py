"""Rotary position embeddings: rotates pairs of a head's dims by the angles of a token's position.

In: x (T, H, D), and the cosines and sines (T, R) of each token's angles, 2R ≤ D. Out: x with its
first 2R dims rotated, dim i together with dim i + R, and the rest unchanged. Computed in float32 at
least, returned in x's dtype.

D = 5, R = 2, angles 90° and 0°: (1, 2, 3, 4, 5) becomes (−3, 2, 1, 4, 5); the pair (1, 3) rotates
to (−3, 1). With start=1 the dims 1 to 4 rotate: (1, 2, 3, 4, 5) becomes (1, −4, 3, 2, 5).

`norm_rotate` norms each head before, with one weight (D) for all heads. `rotate_both` and
`norm_rotate_both` do the same to queries and keys, whose numbers of heads may differ; kernels take
both at once.
"""

import torch
from torch import Tensor

from longshore.ops.backends import pick
from longshore.ops.pointwise import rms_norm


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, start: int = 0) -> Tensor:
    """x with its dims start … start + 2R rotated."""
    _check(x_THD, cos_TR, sin_TR, start)
    kernels = pick("rope", x_THD, cos_TR)
    if kernels is not None:
        output: Tensor = kernels.rotate(x_THD, cos_TR, sin_TR, start=start)
        return output
    return _rotate(x_THD, cos_TR, sin_TR, start)


def norm_rotate(
    x_THD: Tensor,
    weight_D: Tensor,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    *,
    zero_centred: bool = False,
) -> Tensor:
    """rotate(rms_norm(x)); see ops/pointwise.py."""
    _check(x_THD, cos_TR, sin_TR, 0)
    kernels = pick("rope", x_THD, cos_TR, weight_D)
    if kernels is not None:
        output: Tensor = kernels.norm_rotate(x_THD, weight_D, eps, cos_TR, sin_TR, zero_centred)
        return output
    return rotate(rms_norm(x_THD, weight_D, eps, zero_centred=zero_centred), cos_TR, sin_TR)


def rotate_both(
    q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor
) -> tuple[Tensor, Tensor]:
    """rotate(q), rotate(k)."""
    kernels = pick("rope", q_THD, cos_TR)
    if kernels is None or not _alike(q_THD, k_TKD):
        return rotate(q_THD, cos_TR, sin_TR), rotate(k_TKD, cos_TR, sin_TR)
    _check(q_THD, cos_TR, sin_TR, 0)
    both: tuple[Tensor, Tensor] = kernels.rotate_both(q_THD, k_TKD, cos_TR, sin_TR)
    return both


def norm_rotate_both(
    q_THD: Tensor,
    k_TKD: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    *,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """norm_rotate(q), norm_rotate(k); weights: of q and of k, each (D)."""
    kernels = pick("rope", q_THD, cos_TR, weights[0])
    if kernels is None or not _alike(q_THD, k_TKD) or not _alike(*weights):
        q, k = (
            norm_rotate(x_THD, weight_D, eps, cos_TR, sin_TR, zero_centred=zero_centred)
            for x_THD, weight_D in zip((q_THD, k_TKD), weights, strict=True)
        )
        return q, k
    _check(q_THD, cos_TR, sin_TR, 0)
    both: tuple[Tensor, Tensor] = kernels.norm_rotate_both(
        q_THD, k_TKD, weights, eps, cos_TR, sin_TR, zero_centred
    )
    return both


def _alike(q: Tensor, k: Tensor) -> bool:
    """Whether one kernel can take both."""
    return q.dtype == k.dtype and q.shape[::2] == k.shape[::2]


def _check(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, start: int) -> None:
    tokens, _, width = x_THD.shape
    half, room = cos_TR.shape[-1], width - start
    if cos_TR.shape != (tokens, half) or sin_TR.shape != cos_TR.shape or 2 * half > room:
        raise ValueError(
            f"x is {tuple(x_THD.shape)}, the tables are {tuple(cos_TR.shape)} and "
            f"{tuple(sin_TR.shape)}; they need x's {tokens} rows and at most {room // 2} columns"
        )


def _rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, start: int) -> Tensor:
    half = cos_TR.shape[-1]
    middle, stop = start + half, start + 2 * half
    dtype = torch.promote_types(x_THD.dtype, torch.float32)
    cos_T1R, sin_T1R = cos_TR.to(dtype).unsqueeze(1), sin_TR.to(dtype).unsqueeze(1)
    first_THR = x_THD[..., start:middle].to(dtype)
    second_THR = x_THD[..., middle:stop].to(dtype)
    parts = (
        (first_THR * cos_T1R - second_THR * sin_T1R).to(x_THD.dtype),
        (second_THR * cos_T1R + first_THR * sin_T1R).to(x_THD.dtype),
        x_THD[..., stop:],
    )
    return torch.cat(parts if not start else (x_THD[..., :start], *parts), dim=2)
