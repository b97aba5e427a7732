"""RMS norms over the last dim, alone or together with the residual's sum before them.

In: x (…, C), a weight (C), and what is added to x. Out: the sum and its norm, or the norm alone.
Half precision is normed in float32. `zero_centred`: the scale is 1 + weight, in float32 at least.

    rms_norm([3, 4], [1, 1], 0.0)               [0.849, 1.131], since the root mean square is 3.536
    add_norm([1, 1], [2, 3], [1, 1], 0.0)       ([3, 4], [0.849, 1.131])

add_norm may get an x wider than the weight; then the sum is as wide, the norm has the weight's
dtype. Its two results have one gradient: both paths of a residual are summed in one kernel.
"""

import torch
from torch import Tensor
from torch.nn import functional

from longshore.ops.backends import pick


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """x, normed and scaled, in x's dtype or in the weight's if that is wider."""
    kernels = pick("norm", x, weight_C)
    if kernels is not None:
        normed: Tensor = kernels.rms_norm(x, weight_C, eps, zero_centred)
        return normed
    return _rms_norm(x, weight_C, eps, zero_centred)


def add_norm(
    x: Tensor, delta: Tensor | None, weight_C: Tensor, eps: float, *, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """x + delta, or x itself where delta is None; and its norm in the weight's dtype."""
    kernels = pick("norm", x, weight_C)
    if kernels is not None:
        both: tuple[Tensor, Tensor] = kernels.add_norm(x, delta, weight_C, eps, zero_centred)
        return both
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
