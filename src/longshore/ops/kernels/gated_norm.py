"""Gated RMS norms as Triton kernels, forward and backward.

In: x and gate (T, G, W), strided but for the last dim, each W normed apart, and a weight of G·W or,
shared by all G, of W. Out: (T, G, W). Saved for the backward: the inputs and one number for each
norm. With W = 2, x = [3, 4] and a large gate [g, g] the output is [0.849, 1.131] if the gate comes
first, else [0.849·g, 1.131·g].

A program works on one of the G, so the gradient of the weight is a sum over programs: partial sums
in float32, then added in a fixed order.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.kernels.launch import Kernel
from longshore.ops.kernels.norm import blocks, column_sums

ELEMENTS = 2048
"""Of a block, rows times width."""
PROGRAMS = 1056
"""Of the backward: 8 for each of an H200's 132 multiprocessors."""


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, gate_first: bool) -> Tensor:
    out: Tensor = _GatedNorm.apply(x, gate, weight, eps, gate_first)
    return out


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        gate_first: bool,
    ) -> Tensor:
        x, gate, weight = _rows(x), _rows(gate), weight.contiguous()
        count, groups, width = x.shape
        y = torch.empty(count, groups, width, dtype=x.dtype, device=x.device)
        rstd = torch.empty(count, groups, dtype=torch.float32, device=x.device)
        sizes = _sizes(width)
        _gated_norm_forward[(blocks(count, sizes["ROWS"]), groups)](
            x,
            gate,
            weight,
            y,
            rstd,
            count,
            groups,
            width,
            *x.stride()[:2],
            *gate.stride()[:2],
            eps,
            SHARED=weight.shape[0] == width,
            GATE_FIRST=gate_first,
            **sizes,
        )
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.gate_first = gate_first
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, gate, weight, rstd = ctx.saved_tensors
        count, groups, width = x.shape
        grad = _rows(grad)
        sizes = _sizes(width)
        tiles = blocks(count, sizes["ROWS"])
        parts = min(tiles, max(1, PROGRAMS // groups))
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dgate = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
        sums = torch.empty(parts, groups, width, dtype=torch.float32, device=x.device)
        _gated_norm_backward[(parts, groups)](
            x,
            gate,
            weight,
            rstd,
            grad,
            dx,
            dgate,
            sums,
            count,
            groups,
            width,
            *x.stride()[:2],
            *gate.stride()[:2],
            *grad.stride()[:2],
            blocks(tiles, parts),
            SHARED=weight.shape[0] == width,
            GATE_FIRST=ctx.gate_first,
            **sizes,
        )
        dweight = None
        if ctx.needs_input_grad[2]:
            # One row for each part, or for each group of each part where these share the weight.
            (dweight,) = column_sums(sums.view(-1, weight.shape[0]), weight.dtype)
        return dx, dgate, dweight, None, None


@lru_cache
def _sizes(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {
        "ROWS": max(1, ELEMENTS // columns),
        "COLUMNS": columns,
        "num_warps": 4 if columns <= ELEMENTS else 8,
    }


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


@Kernel
@triton.jit(do_not_specialize=["count"])
def _gated_norm_forward(
    x, gate, weight, y, rstd, count, groups, width, stride_t, stride_g, gate_stride_t,
    gate_stride_g, eps, SHARED: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    mask = (t < count)[:, None] & (c < width)[None, :]
    first = 0 if SHARED else group * width
    w = tl.load(weight + first + c, mask=c < width, other=0.0).to(tl.float32)
    places = t[:, None] * stride_t + group * stride_g + c[None, :]
    gate_places = t[:, None] * gate_stride_t + group * gate_stride_g + c[None, :]
    u = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + gate_places, mask=mask, other=0.0).to(tl.float32)
    s = z * tl.sigmoid(z)
    if GATE_FIRST:
        u = u * s
    r = 1.0 / tl.sqrt(tl.sum(u * u, axis=1) / width + eps)
    out = u * r[:, None] * w[None, :]
    if not GATE_FIRST:
        out = out * s
    joined = (t * groups + group)[:, None] * width + c[None, :]
    tl.store(y + joined, out.to(y.dtype.element_ty), mask=mask)
    tl.store(rstd + t * groups + group, r, mask=t < count)


@Kernel
@triton.jit(do_not_specialize=["count", "blocks"])
def _gated_norm_backward(
    x, gate, weight, rstd, grad, dx, dgate, sums, count, groups, width, stride_t, stride_g,
    gate_stride_t, gate_stride_g, grad_stride_t, grad_stride_g, blocks,
    SHARED: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part, group = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, COLUMNS)
    first = 0 if SHARED else group * width
    w = tl.load(weight + first + c, mask=c < width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for block in range(blocks):
        t = ((part * blocks + block) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (t < count)[:, None] & (c < width)[None, :]
        places = t[:, None] * stride_t + group * stride_g + c[None, :]
        gate_places = t[:, None] * gate_stride_t + group * gate_stride_g + c[None, :]
        grad_places = t[:, None] * grad_stride_t + group * grad_stride_g + c[None, :]
        a = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(gate + gate_places, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(grad + grad_places, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(rstd + t * groups + group, mask=t < count, other=0.0)[:, None]
        sig = tl.sigmoid(z)
        s = z * sig
        slope = sig * (1.0 + z * (1.0 - sig))
        if GATE_FIRST:
            n = a * s * r
            total += tl.sum(d * n, axis=0)
            dn = d * w
            du = r * (dn - n * (tl.sum(dn * n, axis=1) / width)[:, None])
            da = du * s
            dz = du * a * slope
        else:
            n = a * r
            total += tl.sum(d * n * s, axis=0)
            dn = d * w * s
            da = r * (dn - n * (tl.sum(dn * n, axis=1) / width)[:, None])
            dz = d * w * n * slope
        joined = (t * groups + group)[:, None] * width + c[None, :]
        tl.store(dx + joined, da.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + joined, dz.to(dgate.dtype.element_ty), mask=mask)
    tl.store(sums + (part * groups + group) * width + c, total, mask=c < width)
