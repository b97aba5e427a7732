"""RMS norms with a gate, after or before the norm.

In: rows (…, C), the gate's rows and a weight. Out: the same shape and dtype; half precision is
normed in float32. With the row [3, 4], a weight of ones and a gate so large that silu(gate) = gate
= [g, g], norm_after_gate gives [0.849, 1.131] whatever g is, norm_before_gate [0.849·g, 1.131·g].
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from longshore.ops.backends import pick


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
