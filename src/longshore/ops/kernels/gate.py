"""SwiGLU, relu2 and sigmoid gates in Triton, and a product that keeps nothing but their inputs.

In and out: as ops/pointwise.py. gate and up are rows with a stride each, so both may be halves of
one (M, 2F) tensor. Backward gives dgate and dup, and on request the output once more, from one
reading of gate, up and the output's gradient:

    inner, dgate, dup = backward("silu", dinner, gate, up, again=True)      inner lies in dinner
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from triton import language as tl

from longshore.ops.kernels.launch import Kernel
from longshore.ops.kernels.norm import as_rows, blocks, empty


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _gate_forward(
    gate_ptr, up_ptr, inner_ptr, rows, gate_stride, up_stride,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    up = tl.load(up_ptr + row * up_stride + column, inside, 0.0).to(tl.float32)
    if KIND == "relu2":
        up = tl.where(up < 0.0, 0.0, up)
        inner = up * up
    else:
        gate = tl.load(gate_ptr + row * gate_stride + column, inside, 0.0).to(tl.float32)
        inner = up / (1.0 + tl.exp(-gate))
        if KIND == "silu":
            inner = inner * gate
    tl.store(inner_ptr + row * WIDTH + column, inner.to(inner_ptr.dtype.element_ty), inside)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _gate_backward(
    dinner_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, inner_ptr, rows, dinner_stride, gate_stride,
    up_stride, KIND: tl.constexpr, AGAIN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    at = row * WIDTH + column
    dinner = tl.load(dinner_ptr + row * dinner_stride + column, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, inside, 0.0).to(tl.float32)
    if KIND == "relu2":
        up = tl.where(up < 0.0, 0.0, up)
        inner = up * up
        dup = 2.0 * up * dinner
    else:
        gate = tl.load(gate_ptr + row * gate_stride + column, inside, 0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        if KIND == "silu":
            factor = gate * sigmoid
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        else:
            factor = sigmoid
            slope = sigmoid * (1.0 - sigmoid)
        inner = factor * up
        dup = factor * dinner
        dgate = slope * up * dinner
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), inside)
    tl.store(dup_ptr + at, dup.to(dup_ptr.dtype.element_ty), inside)
    if AGAIN:
        tl.store(inner_ptr + at, inner.to(inner_ptr.dtype.element_ty), inside)


class _Gated(torch.autograd.Function):
    """The gated rows, times a weight where there is one."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, gate: Tensor | None, up: Tensor, weight: Tensor | None
    ) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up, weight)
        inner = forward(kind, gate, up)
        return inner if weight is None else functional.linear(inner, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        wants_weight = ctx.needs_input_grad[3]
        dinner = grad if weight is None else grad @ weight
        inner, dgate, dup = backward(ctx.kind, dinner, gate, up, again=wants_weight)
        dweight = as_rows(grad).t() @ as_rows(inner) if wants_weight else None
        return None, dgate, dup, dweight


def gated(kind: str, gate: Tensor | None, up: Tensor) -> Tensor:
    """kind: silu, sigmoid or, without a gate, relu2."""
    return _Gated.apply(kind, gate, up, None)


def gated_linear(gate: Tensor | None, up: Tensor, weight: Tensor) -> Tensor:
    return _Gated.apply("relu2" if gate is None else "silu", gate, up, weight)


def forward(kind: str, gate: Tensor | None, up: Tensor) -> Tensor:
    up_NF, width = as_rows(up), up.shape[-1]
    gate_NF = up_NF if gate is None else as_rows(gate)
    inner = empty(up)
    rows, shape = up_NF.shape[0], _tile(width)
    _gate_forward[blocks(rows, shape["ROWS"]), blocks(width, shape["BLOCK"])](
        gate_NF, up_NF, inner, rows, gate_NF.stride(0), up_NF.stride(0),
        KIND=kind, WIDTH=width, **shape,
    )  # fmt: skip
    return inner


def backward(
    kind: str, dinner: Tensor, gate: Tensor | None, up: Tensor, *, again: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dinner, dgate and dup; with `again` dinner, which must be the caller's own, becomes inner."""
    dinner_NF, up_NF, width = as_rows(dinner), as_rows(up), up.shape[-1]
    gate_NF = up_NF if gate is None else as_rows(gate)
    dup = empty(up)
    dgate = None if gate is None else empty(gate)
    assert not again or dinner.is_contiguous()
    rows, shape = up_NF.shape[0], _tile(width)
    _gate_backward[blocks(rows, shape["ROWS"]), blocks(width, shape["BLOCK"])](
        dinner_NF, gate_NF, up_NF, dup if dgate is None else dgate, dup, dinner_NF, rows,
        dinner_NF.stride(0), gate_NF.stride(0), up_NF.stride(0),
        KIND=kind, AGAIN=again, WIDTH=width, **shape,
    )  # fmt: skip
    return dinner, dgate, dup


@lru_cache
def _tile(width: int) -> dict[str, int]:
    block = min(1024, triton.next_power_of_2(width))
    return {"BLOCK": block, "ROWS": 4096 // block, "num_warps": 8}
