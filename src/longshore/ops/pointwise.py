"""RMS norms, gates, rotary embeddings and hyper-connections: what layers do between their products.

In: rows, and what each is normed, gated or rotated by. Out: rows. Each function asks backends.pick
for kernels, which read and write every tensor once, and is plain torch otherwise. Half precision is
computed in float32 and returned as it came. For backward only the inputs are kept.

    rms_norm([3, 4], [1, 1], 0.0)             [0.849, 1.131], since the root mean square is 3.536
    add_norm([1, 1], [2, 3], [1, 1], 0.0)     ([3, 4], [0.849, 1.131])
    swiglu(1, 2) = silu(1)·2 = 1.462          relu2(−1) = 0, relu2(3) = 9
    sigmoid_gate(3, 0) = 1.5                  clipped(9, −9, 7) = 7, −7

Rotations take x (T, H, D), and the cosines and sines (T, R) of each token's angles, 2R ≤ D. Dim i
rotates together with dim i + R, the dims after 2R stay. D = 5, R = 2, angles 90° and 0°:
(1, 2, 3, 4, 5) becomes (−3, 2, 1, 4, 5); with start=1 the dims 1 to 4 rotate, to (1, −4, 3, 2, 5).

The rows of hyper-connections (T, N·C) are N residuals of C channels after each other;
model/hyper_connection.py describes what is computed. Plain torch copies them to float32, and keeps
that for backward; kernels read bfloat16 rows as they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from longshore.ops.backends import pick


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """x (…, C), normed and scaled, in x's dtype or in the weight's if that is wider.

    zero_centred: the scale is 1 + weight, in float32 at least.
    """
    kernels = pick("norm", x, weight_C)
    if kernels is not None:
        return kernels.rms_norm(x, weight_C, eps, zero_centred)
    return _rms_norm(x, weight_C, eps, zero_centred)


def add_norm(
    x: Tensor, delta: Tensor | None, weight_C: Tensor, eps: float, *, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """x + delta, or x itself where delta is None; and its norm in the weight's dtype.

    x may be wider than the weight; then the sum is as wide. The two results have one gradient: both
    paths of a residual are summed in one kernel.
    """
    kernels = pick("norm", x, weight_C)
    if kernels is not None:
        return kernels.add_norm(x, delta, weight_C, eps, zero_centred)
    total = x if delta is None else x + delta
    return total, _rms_norm(total.to(weight_C.dtype), weight_C, eps, zero_centred)


def _rms_norm(x: Tensor, weight_C: Tensor, eps: float, zero_centred: bool) -> Tensor:
    if not zero_centred:
        weight_C = weight_C.to(torch.promote_types(weight_C.dtype, x.dtype))
        return functional.rms_norm(x, weight_C.shape, weight_C, eps)
    # In float32 at least: in bfloat16 a small weight would be lost beside 1.
    wide = torch.promote_types(x.dtype, torch.float32)
    scale_C = 1.0 + weight_C.to(wide)
    return functional.rms_norm(x.to(wide), scale_C.shape, scale_C, eps).to(x.dtype)


def norm_after_gate(x: Tensor, gate: Tensor, weight: Tensor, *, groups: int, eps: float) -> Tensor:
    """weight · norm(x · silu(gate)), each of `groups` parts of the channels normed apart."""
    kernels = pick("gated norm", x, gate)
    if kernels is not None:
        x_TGW, gate_TGW = (torch.unflatten(_flat(rows, 1), -1, (groups, -1)) for rows in (x, gate))
        y_TGW: Tensor = kernels.gated_norm(x_TGW, gate_TGW, weight, eps=eps, gate_first=True)
        return y_TGW.reshape(x.shape)
    wide = _wide(x)
    gated = torch.unflatten(wide * functional.silu(_wide(gate)), -1, (groups, -1))
    normed = functional.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def shared_norm_after_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float,
    mean_over_ranks: Callable[[Tensor], Tensor],
) -> Tensor:
    """The same for ranks that have different channels of one part.

    mean_over_ranks: the mean of the ranks' mean squares (…, 1), differentiable.
    """
    wide = _wide(x)
    gated = wide * functional.silu(_wide(gate))
    mean_square = mean_over_ranks(gated.square().mean(-1, keepdim=True))
    return (gated * (mean_square + eps).rsqrt() * weight.to(wide.dtype)).to(x.dtype)


def norm_before_gate(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """weight · norm(x) · silu(gate) over the last dim."""
    kernels = pick("gated norm", x, gate)
    if kernels is not None:
        x_THW, gate_THW = _flat(x, 2), _flat(gate, 2)
        y_THW: Tensor = kernels.gated_norm(x_THW, gate_THW, weight, eps=eps, gate_first=False)
        return y_THW.reshape(x.shape)
    wide = _wide(x)
    weight = weight.to(wide.dtype)
    normed = functional.rms_norm(wide, weight.shape, weight, eps)
    return (normed * functional.silu(_wide(gate))).to(x.dtype)


def _flat(x: Tensor, last: int) -> Tensor:
    """(T, …) with `last` dims after the first, as the kernels take them; mostly x itself."""
    missing = max(0, last - x.dim())
    return x if x.dim() == last + 1 else x.reshape(-1, *(1,) * missing, *x.shape[-last:])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    kernels = pick("gate", gate, up)
    if kernels is not None:
        return kernels.gated("silu", gate, up)
    return functional.silu(gate) * up


def clipped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The gate up to `limit`, and up between −limit and limit; in plain torch."""
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def relu2(up: Tensor) -> Tensor:
    """relu(up)²."""
    kernels = pick("gate", up)
    if kernels is not None:
        return kernels.gated("relu2", None, up)
    return functional.relu(up).square()


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate)."""
    kernels = pick("gate", gate, x)
    if kernels is not None:
        return kernels.gated("sigmoid", gate, x)
    return x * gate.sigmoid()


def gated_linear(gate_TF: Tensor | None, up_TF: Tensor, weight_CF: Tensor) -> Tensor:
    """(T, C): swiglu(gate, up), or relu2(up) without a gate, times the weight.

    Kernels compute the (T, F) product between again in backward, and never keep it.
    """
    kernels = pick("gate", *(x for x in (gate_TF, up_TF, weight_CF) if x is not None))
    if kernels is not None:
        return kernels.gated_linear(gate_TF, up_TF, weight_CF)
    inner_TF = relu2(up_TF) if gate_TF is None else swiglu(gate_TF, up_TF)
    return functional.linear(inner_TF, weight_CF)


def project(rows_TS: Tensor, weight_MS: Tensor, *, eps: float) -> Tensor:
    """(T, M): the rows divided by their root mean square, times the weight, in float32 at least."""
    kernels = pick("hyper-connections", rows_TS, weight_MS)
    if kernels is not None:
        return kernels.project(rows_TS, weight_MS, eps)
    wide_TS = _wide(rows_TS)
    inverse_T1 = torch.rsqrt(wide_TS.square().mean(1, keepdim=True) + eps)
    # Divided afterwards: the same, and one tensor less is kept.
    return functional.linear(wide_TS, weight_MS.to(wide_TS.dtype)) * inverse_T1


def collapse(rows_TS: Tensor, pre_TN: Tensor) -> Tensor:
    """(T, C): Σ_n pre_n · x_n, in the rows' dtype. Rows 1 and 3 with pre ½ and ½ give 2."""
    kernels = pick("hyper-connections", rows_TS, pre_TN)
    if kernels is not None:
        return kernels.collapse(rows_TS, pre_TN)
    rows_TNC = _wide(rows_TS).unflatten(1, (pre_TN.shape[1], -1))
    row_T1C: Tensor = pre_TN[:, None, :] @ rows_TNC
    return row_T1C.sum(1).to(rows_TS.dtype)  # of one row; a view would not do, see `expand`


def expand(output_TC: Tensor, rows_TS: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
    """(T, N·C): post_k · output + Σ_n mix_nk · x_n, in the rows' dtype."""
    dtype, count = rows_TS.dtype, post_TN.shape[1]
    kernels = pick("hyper-connections", rows_TS, post_TN)
    if kernels is not None:
        return kernels.expand(output_TC.to(dtype), rows_TS, post_TN, mix_TNN)
    rows_TNC = rows_TS.unflatten(1, (count, -1))
    added_TNC = post_TN.to(dtype)[:, :, None] * output_TC.to(dtype)[:, None, :]
    mixed_TNC: Tensor = mix_TNN.to(dtype).mT @ rows_TNC
    return added_TNC.flatten(1) + mixed_TNC.flatten(1)  # no view, which FSDP warns of


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, start: int = 0) -> Tensor:
    """x with its dims start … start + 2R rotated."""
    _check_tables(x_THD, cos_TR, sin_TR, start)
    kernels = pick("rope", x_THD, cos_TR)
    if kernels is not None:
        return kernels.rotate(x_THD, None, cos_TR, sin_TR, start=start)[0]
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


def norm_rotate(
    x_THD: Tensor,
    weight_D: Tensor,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    *,
    zero_centred: bool = False,
) -> Tensor:
    """rotate(rms_norm(x)), with one weight (D) for all heads."""
    _check_tables(x_THD, cos_TR, sin_TR, 0)
    kernels = pick("rope", x_THD, cos_TR, weight_D)
    if kernels is not None:
        weights = weight_D, None
        return kernels.norm_rotate(x_THD, None, weights, eps, cos_TR, sin_TR, zero_centred)[0]
    return rotate(rms_norm(x_THD, weight_D, eps, zero_centred=zero_centred), cos_TR, sin_TR)


def rotate_both(
    q_THD: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor
) -> tuple[Tensor, Tensor]:
    """rotate(q), rotate(k), whose numbers of heads may differ: one kernel for both."""
    kernels = pick("rope", q_THD, cos_TR)
    if kernels is None or not _alike(q_THD, k_TKD):
        return rotate(q_THD, cos_TR, sin_TR), rotate(k_TKD, cos_TR, sin_TR)
    _check_tables(q_THD, cos_TR, sin_TR, 0)
    return kernels.rotate(q_THD, k_TKD, cos_TR, sin_TR)


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
    _check_tables(q_THD, cos_TR, sin_TR, 0)
    return kernels.norm_rotate(q_THD, k_TKD, weights, eps, cos_TR, sin_TR, zero_centred)


def _alike(q: Tensor, k: Tensor) -> bool:
    """Whether one kernel can take both."""
    return q.dtype == k.dtype and q.shape[::2] == k.shape[::2]


def _check_tables(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, start: int) -> None:
    tokens, _, width = x_THD.shape
    half, most = cos_TR.shape[-1], (width - start) // 2
    if cos_TR.shape != (tokens, half) or sin_TR.shape != cos_TR.shape or half > most:
        raise ValueError(
            f"x is {tuple(x_THD.shape)}, the tables are {tuple(cos_TR.shape)} and "
            f"{tuple(sin_TR.shape)}; they need x's {tokens} rows and at most {most} columns"
        )
