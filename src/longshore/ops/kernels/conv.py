"""Causal depthwise convolution with SiLU, as Triton kernels.

In and out: as ops/conv.py, with the boundaries as tables on the device: `since`, the rows since the
start of a row's span, and with `before` the span of each row and its first row. For spans of 3 and
2 rows since is 0 1 2 0 1: a tap that reaches j rows back reads x where since ≥ j, else `before`.

Row t gives to row t − j where since[t] ≥ j, so the backward needs no table of its own. It first
makes the gradient of the sum before SiLU, in float32, with partial sums of the gradients of
taps and bias; from that come the gradients of x and `before`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.kernels.launch import Kernel
from longshore.ops.kernels.norm import blocks, column_sums

ROWS, CHANNELS = 16, 256
PARTS = 64
"""Programs that share out the rows in the gradients of taps and bias."""


class _Conv(torch.autograd.Function):
    """(T, C). tables: since, span, and the first row of each span, then T; int32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
        tables: tuple[Tensor, ...], activation: bool,
    ) -> Tensor:  # fmt: skip
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        before = None if before is None else before.contiguous()
        since, span, _ = tables
        rows, channels = x.shape
        y = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
        grid = (blocks(rows, ROWS), blocks(channels, CHANNELS))
        _conv_forward[grid](
            x, weight, x if bias is None else bias, x if before is None else before, since, span, y,
            rows, channels, x.stride(0), TAPS=weight.shape[1], BIAS=bias is not None,
            BEFORE=before is not None, SILU=activation, ROWS=ROWS, CHANNELS=CHANNELS,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, before, *tables)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, before, since, span, starts = ctx.saved_tensors
        rows, channels = x.shape
        taps = weight.shape[1]
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        columns, tiles = blocks(channels, CHANNELS), blocks(rows, ROWS)
        parts = min(PARTS, tiles)
        dpre = torch.empty(rows, channels, dtype=torch.float32, device=x.device)
        sums = torch.empty(parts, taps + 1, channels, dtype=torch.float32, device=x.device)
        _backward_sums[(parts, columns)](
            x, weight, x if bias is None else bias, x if before is None else before, since, span,
            grad, dpre, sums, rows, channels, x.stride(0), grad.stride(0), blocks(tiles, parts),
            TAPS=taps, SLOTS=1 << taps.bit_length(), BIAS=bias is not None,
            BEFORE=before is not None, SILU=ctx.activation, ROWS=ROWS, CHANNELS=CHANNELS,
        )  # fmt: skip
        dx = dbefore = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
            _backward_rows[(tiles, columns)](
                dpre, weight, since, dx, rows, channels, TAPS=taps, ROWS=ROWS, CHANNELS=CHANNELS
            )
        if before is not None and ctx.needs_input_grad[3]:
            dbefore = torch.empty_like(before)
            _backward_before[(len(before), columns)](
                dpre, weight, starts, dbefore, channels, TAPS=taps, CHANNELS=CHANNELS
            )
        (total,) = column_sums(sums.view(parts, -1), weight.dtype)
        total = total.view(taps + 1, channels)
        dweight = total[:taps].t()
        dbias = None if bias is None else total[taps].to(bias.dtype)
        return dx, dweight, dbias, dbefore, None, None


conv = _Conv.apply


@triton.jit
def _sums(
    x, weight, bias, before, t, c, ago, span, rows, channels, stride,
    TAPS: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The convolution of a block, before SiLU, in float32."""
    total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for j in tl.static_range(TAPS):
        tap = tl.load(weight + c * TAPS + (TAPS - 1 - j), mask=c < channels, other=0.0)
        rows_x = _reached(
            x, before, t, c, ago, span, rows, channels, stride, j, TAPS=TAPS, BEFORE=BEFORE
        )
        total += rows_x * tap.to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _reached(
    x, before, t, c, ago, span, rows, channels, stride, j: tl.constexpr,
    TAPS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """What the tap that reaches j rows back reads, in float32."""
    inside = (t < rows) & (ago >= j)
    mask = inside[:, None] & (c < channels)[None, :]
    places = (t - j)[:, None].to(tl.int64) * stride + c[None, :]
    values = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    if BEFORE:
        outside = (t < rows) & (ago < j)
        halo = span.to(tl.int64) * (TAPS - 1) + (TAPS - 1 - j) + ago
        mask = outside[:, None] & (c < channels)[None, :]
        places = halo[:, None] * channels + c[None, :]
        values += tl.load(before + places, mask=mask, other=0.0).to(tl.float32)
    return values


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _conv_forward(
    x, weight, bias, before, since, spans, y, rows, channels, stride,
    TAPS: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ago = tl.load(since + t, mask=t < rows, other=0)
    span = tl.load(spans + t, mask=t < rows, other=0)
    total = _sums(
        x, weight, bias, before, t, c, ago, span, rows, channels, stride,
        TAPS=TAPS, BIAS=BIAS, BEFORE=BEFORE, ROWS=ROWS, CHANNELS=CHANNELS,
    )  # fmt: skip
    if SILU:
        total = total * tl.sigmoid(total)
    mask = (t < rows)[:, None] & (c < channels)[None, :]
    places = t[:, None].to(tl.int64) * channels + c[None, :]
    tl.store(y + places, total.to(y.dtype.element_ty), mask=mask)


@Kernel
@triton.jit(do_not_specialize=["rows", "blocks"])
def _backward_sums(
    x, weight, bias, before, since, spans, grad, dpre, sums, rows, channels, stride, grad_stride,
    blocks, TAPS: tl.constexpr, SLOTS: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    slots = tl.arange(0, SLOTS)
    total = tl.zeros((SLOTS, CHANNELS), dtype=tl.float32)
    for block in range(blocks):
        t = (part * blocks + block) * ROWS + tl.arange(0, ROWS)
        ago = tl.load(since + t, mask=t < rows, other=0)
        span = tl.load(spans + t, mask=t < rows, other=0)
        mask = (t < rows)[:, None] & (c < channels)[None, :]
        wide = t[:, None].to(tl.int64)
        d = tl.load(grad + wide * grad_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if SILU:
            pre = _sums(
                x, weight, bias, before, t, c, ago, span, rows, channels, stride,
                TAPS=TAPS, BIAS=BIAS, BEFORE=BEFORE, ROWS=ROWS, CHANNELS=CHANNELS,
            )  # fmt: skip
            s = tl.sigmoid(pre)
            d = d * s * (1.0 + pre * (1.0 - s))
        tl.store(dpre + wide * channels + c[None, :], d.to(dpre.dtype.element_ty), mask=mask)
        for j in tl.static_range(TAPS):
            rows_x = _reached(
                x, before, t, c, ago, span, rows, channels, stride, j, TAPS=TAPS, BEFORE=BEFORE
            )
            here = tl.sum(d * rows_x, axis=0)
            total += tl.where((slots == TAPS - 1 - j)[:, None], here[None, :], 0.0)
        total += tl.where((slots == TAPS)[:, None], tl.sum(d, axis=0)[None, :], 0.0)
    places = (part * (TAPS + 1) + slots)[:, None].to(tl.int64) * channels + c[None, :]
    tl.store(sums + places, total, mask=(slots <= TAPS)[:, None] & (c < channels)[None, :])


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _backward_rows(
    dpre, weight, since, dx, rows, channels,
    TAPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for j in tl.static_range(TAPS):
        later = t + j
        inside = (later < rows) & (tl.load(since + later, mask=later < rows, other=-1) >= j)
        mask = inside[:, None] & (c < channels)[None, :]
        places = later[:, None].to(tl.int64) * channels + c[None, :]
        tap = tl.load(weight + c * TAPS + (TAPS - 1 - j), mask=c < channels, other=0.0)
        d = tl.load(dpre + places, mask=mask, other=0.0).to(tl.float32)
        total += d * tap.to(tl.float32)[None, :]
    mask = (t < rows)[:, None] & (c < channels)[None, :]
    places = t[:, None].to(tl.int64) * channels + c[None, :]
    tl.store(dx + places, total.to(dx.dtype.element_ty), mask=mask)


@Kernel
@triton.jit
def _backward_before(
    dpre, weight, starts, dbefore, channels, TAPS: tl.constexpr, CHANNELS: tl.constexpr
):
    span = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start, stop = tl.load(starts + span), tl.load(starts + span + 1)
    for i in tl.static_range(TAPS - 1):
        total = tl.zeros((CHANNELS,), dtype=tl.float32)
        for r in tl.static_range(i + 1):
            t = start + r
            mask = (c < channels) & (t < stop)
            tap = tl.load(weight + c * TAPS + (i - r), mask=c < channels, other=0.0)
            d = tl.load(dpre + t.to(tl.int64) * channels + c, mask=mask, other=0.0)
            total += d.to(tl.float32) * tap.to(tl.float32)
        places = (span * (TAPS - 1) + i) * channels + c
        tl.store(dbefore + places, total.to(dbefore.dtype.element_ty), mask=c < channels)
