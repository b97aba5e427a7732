"""RMS norms in Triton: of a residual's sum, in the kernel that adds it up; and with a gate.

In and out: as ops/pointwise.py. Every tensor is read once and written once. For backward the sum
alone is kept, which the next layer's residual keeps anyway; the root mean square is computed again.
Gated norms keep their inputs and one number for each norm.

A program takes `ROWS` rows of one tile. Backward runs a fixed number of programs; each walks over
the rows with a stride and keeps its part of the weight's gradient in registers. With 10 rows, 4 a
tile and 2 programs, program 0 takes rows 0 to 3 and 8 to 9, program 1 rows 4 to 7, and the sum of
their two parts, by `column_sums`, is the gradient, in the same order every time.

The host's time counts: a launch is as long as a small kernel. So sizes are computed once for each
width, and by Python's own integers: triton.cdiv takes microseconds.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

from longshore.ops.kernels.launch import Kernel


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _norm_forward(
    x_ptr, delta_ptr, weight_ptr, total_ptr, normed_ptr, rows, x_stride, delta_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    x = tl.load(x_ptr + row * x_stride + column, inside, 0.0).to(tl.float32)
    if ADDS:
        x += tl.load(delta_ptr + row * delta_stride + column, inside, 0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + column, total, inside)
        # The norm of what backward will read.
        x = total.to(tl.float32)
    scale = tl.load(weight_ptr + column, column < WIDTH, 0.0).to(tl.float32)
    if ZERO_CENTRED:
        scale += 1.0
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / WIDTH + eps)
    normed = (x * rstd * scale).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * WIDTH + column, normed, inside)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    dtotal_ptr, dnormed_ptr, x_ptr, weight_ptr, dx_ptr, ddelta_ptr, partial_ptr, rows,
    dtotal_stride, dnormed_stride, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_DTOTAL: tl.constexpr,
    HAS_DDELTA: tl.constexpr, ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight_ptr + column, column < WIDTH, 0.0).to(tl.float32)
    if ZERO_CENTRED:
        scale += 1.0
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < WIDTH)
        x = tl.load(x_ptr + row * x_stride + column, inside, 0.0).to(tl.float32)
        dnormed = tl.load(dnormed_ptr + row * dnormed_stride + column, inside, 0.0)
        dnormed = dnormed.to(tl.float32)
        dscaled = dnormed * scale
        # Rows past the end hold zeros; without eps they would give 0 · inf.
        square = tl.where(row < rows, tl.sum(x * x, 1, keep_dims=True) / WIDTH + eps, 1.0)
        rstd = 1.0 / tl.sqrt(square)
        xhat = x * rstd
        dweight += dnormed * xhat
        dx = rstd * (dscaled - xhat * (tl.sum(dscaled * xhat, 1, keep_dims=True) / WIDTH))
        if HAS_DTOTAL:
            dtotal = tl.load(dtotal_ptr + row * dtotal_stride + column, inside, 0.0)
            dx += dtotal.to(tl.float32)
        tl.store(dx_ptr + row * WIDTH + column, dx.to(dx_ptr.dtype.element_ty), inside)
        if HAS_DDELTA:
            ddelta = dx.to(ddelta_ptr.dtype.element_ty)
            tl.store(ddelta_ptr + row * WIDTH + column, ddelta, inside)
    # The columns of the sum have to be of the shape of `column`.
    part = tl.sum(dweight, 0, keep_dims=True)
    tl.store(partial_ptr + tl.program_id(0) * WIDTH + column, part, column < WIDTH)


@Kernel
@triton.jit(do_not_specialize=["middle", "stop"])
def _column_sums(
    part_ptr, sum_ptr, middle, stop, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Row 0 of the result is the sum of rows 0 to middle, row 1 of those from there to stop."""
    group = tl.program_id(1)
    first = group * middle
    last = tl.where(group == 0, middle, stop)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(part_ptr + row * WIDTH + column, (row < last) & (column < WIDTH), 0.0)
    result = tl.sum(total, 0, keep_dims=True).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + group * WIDTH + column, result, column < WIDTH)


class _Norm(torch.autograd.Function):
    """The sum and its norm, or the norm of x alone; where nothing is added, the sum is x itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, zero_centred: bool,
        alone: bool,
    ) -> tuple[Tensor, ...] | Tensor:  # fmt: skip
        ctx.set_materialize_grads(alone)
        weight = weight.contiguous()
        dtype = x.dtype if alone else weight.dtype
        total, normed = forward(x, delta, weight, eps, zero_centred, dtype=dtype)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.zero_centred = eps, zero_centred
        ctx.dtypes = x.dtype, None if delta is None else delta.dtype
        return normed if alone else (total, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        x_dtype, delta_dtype = ctx.dtypes
        dtotal, dnormed = (None, *grads) if len(grads) == 1 else grads
        if dnormed is None:
            dx = None if dtotal is None else dtotal.to(x_dtype)
            ddelta = None if dtotal is None or delta_dtype is None else dtotal.to(delta_dtype)
            return dx, ddelta, None, None, None, None
        dx, ddelta, dweight = backward(
            dtotal, dnormed, total, weight, dtypes=ctx.dtypes, eps=ctx.eps,
            zero_centred=ctx.zero_centred, wants_weight=ctx.needs_input_grad[2],
        )  # fmt: skip
        return dx, ddelta, dweight, None, None, None


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    return _Norm.apply(x, delta, weight, eps, zero_centred, False)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    return _Norm.apply(x, None, weight, eps, zero_centred, True)


def forward(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centred: bool,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The sum, and the norm in `dtype`."""
    x_NC, width = as_rows(x), x.shape[-1]
    normed = empty(x, dtype)
    total, delta_NC = x, x_NC
    if delta is not None:
        alike = x.dtype == delta.dtype
        total = empty(x, x.dtype if alike else torch.promote_types(x.dtype, delta.dtype))
        delta_NC = as_rows(delta)
    rows, shape = x_NC.shape[0], tile(width)
    _norm_forward[(blocks(rows, shape["ROWS"]),)](
        x_NC, delta_NC, weight, total, normed, rows, x_NC.stride(0), delta_NC.stride(0), eps,
        WIDTH=width, ADDS=delta is not None, ZERO_CENTRED=zero_centred, **shape,
    )  # fmt: skip
    return total, normed


def backward(
    dtotal: Tensor | None,
    dnormed: Tensor,
    total: Tensor,
    weight: Tensor,
    *,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    eps: float,
    zero_centred: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, of delta and of the weight. dtypes: of x and delta; alike they share one."""
    total_NC, dnormed_NC, width = as_rows(total), as_rows(dnormed), total.shape[-1]
    dtotal_NC = dnormed_NC if dtotal is None else as_rows(dtotal)
    x_dtype, delta_dtype = dtypes
    dx = ddelta = empty(total, x_dtype)
    apart = delta_dtype is not None and delta_dtype != x_dtype
    if apart:
        ddelta = empty(total, delta_dtype)
    rows, shape = total_NC.shape[0], tile(width)
    count = programs(total.device, tiles=blocks(rows, shape["ROWS"]))
    partial = total.new_empty(count, width, dtype=torch.float32)
    _norm_backward[(count,)](
        dtotal_NC, dnormed_NC, total_NC, weight, dx, ddelta, partial, rows,
        dtotal_NC.stride(0), dnormed_NC.stride(0), total_NC.stride(0), eps, WIDTH=width,
        HAS_DTOTAL=dtotal is not None, HAS_DDELTA=apart, ZERO_CENTRED=zero_centred, **shape,
    )  # fmt: skip
    dweight = column_sums(partial, weight.dtype)[0] if wants_weight else None
    return dx, None if delta_dtype is None else ddelta, dweight


def column_sums(
    partial_PC: Tensor, dtype: torch.dtype, *, middle: int | None = None
) -> tuple[Tensor, ...]:
    """(C), of all rows; with `middle` of the rows up to it, and of those from there on."""
    stop, width = partial_PC.shape
    groups = 1 if middle is None else 2
    sums = partial_PC.new_empty(groups * width, dtype=dtype)
    block = 32
    _column_sums[(blocks(width, block), groups)](
        partial_PC, sums, stop if middle is None else middle, stop,
        WIDTH=width, BLOCK=block, ROWS=128, num_warps=4,
    )  # fmt: skip
    return (sums,) if middle is None else sums.split(width)


def empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, with the shape of `like`."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def blocks(count: int, size: int) -> int:
    """How many of this size cover the count."""
    return -(-count // size)


def as_rows(x: Tensor) -> Tensor:
    """(N, C) with its last dim contiguous; a copy only where no view can be."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@lru_cache
def tile(width: int) -> dict[str, int]:
    """Rows at once, and threads: 32 numbers of each tensor for a thread."""
    block = triton.next_power_of_2(width)
    rows = max(1, 4096 // block)
    return {"BLOCK": block, "ROWS": rows, "num_warps": max(4, rows * block // 1024)}


def programs(device: torch.device, *, tiles: int, each: int = 4) -> int:
    """How many walk over the tiles: `each` on a multiprocessor, the same for every call."""
    return max(1, min(tiles, each * multiprocessors(device)))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """1 in Triton's interpreter, so that small tests have programs with several tiles."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


ELEMENTS = 2048
"""Numbers of a block of a gated norm, rows times width."""
PROGRAMS = 1056
"""Programs of its backward: 8 for each of an H200's 132 multiprocessors."""


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, gate_first: bool) -> Tensor:
    """x and gate: (T, G, W), each W normed apart; a weight of G·W or, shared by all G, of W."""
    return _GatedNorm.apply(x, gate, weight, eps, gate_first)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool
    ) -> Tensor:
        x, gate, weight = _rows(x), _rows(gate), weight.contiguous()
        count, groups, width = x.shape
        y = torch.empty(count, groups, width, dtype=x.dtype, device=x.device)
        rstd = torch.empty(count, groups, dtype=torch.float32, device=x.device)
        sizes = _sizes(width)
        _gated_norm_forward[(blocks(count, sizes["ROWS"]), groups)](
            x, gate, weight, y, rstd, count, groups, width, *x.stride()[:2], *gate.stride()[:2],
            eps, SHARED=weight.shape[0] == width, GATE_FIRST=gate_first, **sizes,
        )  # fmt: skip
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.gate_first = gate_first
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
            x, gate, weight, rstd, grad, dx, dgate, sums, count, groups, width,
            *x.stride()[:2], *gate.stride()[:2], *grad.stride()[:2], blocks(tiles, parts),
            SHARED=weight.shape[0] == width, GATE_FIRST=ctx.gate_first, **sizes,
        )  # fmt: skip
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
