"""Rotary embeddings in Triton, with the norm of each head before them in the same kernel.

In and out: as ops/rope.py; x may be a view with strides, the last dim contiguous. A row is one head
of one token: with 16 heads row 35 is head 3 of token 2. Its dims are three parts: `first` and
`second`, which rotate together, and the rest. For D = 192, R = 32 and start 128 these are dims 128
to 159, 160 to 191 and 0 to 127.

For backward a rotation keeps only its tables, a norm x as well; the root mean square is computed
again. The weight's gradient is summed as in kernels/norm.py.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

from longshore.ops.kernels.norm import programs


@triton.jit
def _part(ptr, at, mask):
    return tl.load(ptr + at, mask, 0.0).to(tl.float32)


@triton.jit
def _scale(ptr, column, mask, ZERO_CENTRED: tl.constexpr):
    scale = tl.load(ptr + column, mask, 0.0).to(tl.float32)
    if ZERO_CENTRED:
        scale += 1.0
    return scale


@triton.jit
def _columns(
    START: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Of `first` and of the rest, and which of a table and of the rest there are."""
    turn = tl.arange(0, HALF_BLOCK)[None, :]
    rest = tl.arange(0, REST_BLOCK)[None, :]
    is_rest = rest < WIDTH - 2 * HALF
    if START == 0:
        rest += 2 * HALF
    elif START + 2 * HALF < WIDTH:
        rest = tl.where(rest < START, rest, rest + 2 * HALF)
    return turn, rest, turn < HALF, is_rest


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    rows,
    x_token,
    x_head,
    eps,
    sign,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NORMS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // HEADS, row % HEADS
    turn, rest, is_turn, is_rest = _columns(START, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
    turns, rests = (row < rows) & is_turn, (row < rows) & is_rest
    x_at = token * x_token + head * x_head
    first = _part(x_ptr, x_at + START + turn, turns)
    second = _part(x_ptr, x_at + START + HALF + turn, turns)
    others = _part(x_ptr, x_at + rest, rests)
    if NORMS:
        squares = tl.sum(first * first + second * second, 1, keep_dims=True)
        squares += tl.sum(others * others, 1, keep_dims=True)
        rstd = 1.0 / tl.sqrt(squares / WIDTH + eps)
        first *= rstd * _scale(weight_ptr, START + turn, is_turn, ZERO_CENTRED)
        second *= rstd * _scale(weight_ptr, START + HALF + turn, is_turn, ZERO_CENTRED)
        others *= rstd * _scale(weight_ptr, rest, is_rest, ZERO_CENTRED)
    cos = tl.load(cos_ptr + token * HALF + turn, turns, 0.0)
    sin = tl.load(sin_ptr + token * HALF + turn, turns, 0.0) * sign
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out_at = out_ptr + row * WIDTH
    tl.store(out_at + START + turn, (first * cos - second * sin).to(dtype), turns)
    tl.store(out_at + START + HALF + turn, (second * cos + first * sin).to(dtype), turns)
    tl.store(out_at + rest, others.to(dtype), rests)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dout_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    dout_token,
    dout_head,
    x_token,
    x_head,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):
    turn, rest, is_turn, is_rest = _columns(START, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
    second_turn = START + HALF + turn
    turn_scale = _scale(weight_ptr, START + turn, is_turn, ZERO_CENTRED)
    second_scale = _scale(weight_ptr, second_turn, is_turn, ZERO_CENTRED)
    rest_scale = _scale(weight_ptr, rest, is_rest, ZERO_CENTRED)
    dfirst = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    dsecond = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    dothers = tl.zeros((ROWS, REST_BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        token, head = row // HEADS, row % HEADS
        turns, rests = (row < rows) & is_turn, (row < rows) & is_rest
        x_at, dout_at = token * x_token + head * x_head, token * dout_token + head * dout_head
        first = _part(x_ptr, x_at + START + turn, turns)
        second = _part(x_ptr, x_at + second_turn, turns)
        others = _part(x_ptr, x_at + rest, rests)
        drotated = _part(dout_ptr, dout_at + START + turn, turns)
        drotated_second = _part(dout_ptr, dout_at + second_turn, turns)
        d_others = _part(dout_ptr, dout_at + rest, rests)
        cos = tl.load(cos_ptr + token * HALF + turn, turns, 0.0)
        sin = tl.load(sin_ptr + token * HALF + turn, turns, 0.0)
        d_first = drotated * cos + drotated_second * sin
        d_second = drotated_second * cos - drotated * sin
        squares = tl.sum(first * first + second * second, 1, keep_dims=True)
        squares += tl.sum(others * others, 1, keep_dims=True)
        # Rows past the end hold zeros; without eps they would give 0 · inf.
        rstd = 1.0 / tl.sqrt(tl.where(row < rows, squares / WIDTH + eps, 1.0))
        first *= rstd
        second *= rstd
        others *= rstd
        dfirst += d_first * first
        dsecond += d_second * second
        dothers += d_others * others
        d_first *= turn_scale
        d_second *= second_scale
        d_others *= rest_scale
        along = tl.sum(d_first * first + d_second * second, 1, keep_dims=True)
        along = (along + tl.sum(d_others * others, 1, keep_dims=True)) / WIDTH
        dtype: tl.constexpr = dx_ptr.dtype.element_ty
        dx_at = dx_ptr + row * WIDTH
        tl.store(dx_at + START + turn, (rstd * (d_first - first * along)).to(dtype), turns)
        tl.store(dx_at + second_turn, (rstd * (d_second - second * along)).to(dtype), turns)
        tl.store(dx_at + rest, (rstd * (d_others - others * along)).to(dtype), rests)
    part_ptr = partial_ptr + tl.program_id(0) * WIDTH
    tl.store(part_ptr + START + turn, tl.sum(dfirst, 0, keep_dims=True), is_turn)
    tl.store(part_ptr + second_turn, tl.sum(dsecond, 0, keep_dims=True), is_turn)
    tl.store(part_ptr + rest, tl.sum(dothers, 0, keep_dims=True), is_rest)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, start: int) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(cos, sin)
        ctx.start = start
        return _rotated(x, cos, sin, start=start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        cos, sin = ctx.saved_tensors
        return _rotated(dout, cos, sin, start=ctx.start, sign=-1.0), None, None, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        zero_centred: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps, ctx.zero_centred = eps, zero_centred
        return _rotated(x, cos, sin, weight=weight, eps=eps, zero_centred=zero_centred)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, weight, cos, sin = ctx.saved_tensors
        x, dout = _unit_stride(x), _unit_stride(dout)
        dx = x.new_empty(x.shape)
        tokens, heads, width = x.shape
        shape = _tile(width, cos.shape[1])
        count = programs(x.device, tiles=triton.cdiv(tokens * heads, shape["ROWS"]))
        partial = x.new_empty(count, width, dtype=torch.float32)
        _backward[(count,)](
            dout,
            x,
            weight,
            cos,
            sin,
            dx,
            partial,
            tokens * heads,
            *dout.stride()[:2],
            *x.stride()[:2],
            ctx.eps,
            HEADS=heads,
            WIDTH=width,
            START=0,
            ZERO_CENTRED=ctx.zero_centred,
            **shape,
        )
        return dx, partial.sum(0).to(weight.dtype), None, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, start: int = 0) -> Tensor:
    output: Tensor = _Rotate.apply(x, cos.contiguous(), sin.contiguous(), start)
    return output


def norm_rotate(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, zero_centred: bool
) -> Tensor:
    cos, sin = cos.contiguous(), sin.contiguous()
    output: Tensor = _NormRotate.apply(x, weight, eps, cos, sin, zero_centred)
    return output


def _rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    start: int = 0,
    sign: float = 1.0,
    weight: Tensor | None = None,
    eps: float = 0.0,
    zero_centred: bool = False,
) -> Tensor:
    """sign: −1 rotates back."""
    x = _unit_stride(x)
    out = x.new_empty(x.shape)
    tokens, heads, width = x.shape
    shape = _tile(width, cos.shape[1])
    _forward[(triton.cdiv(tokens * heads, shape["ROWS"]),)](
        x,
        x if weight is None else weight,
        cos,
        sin,
        out,
        tokens * heads,
        *x.stride()[:2],
        eps,
        sign,
        HEADS=heads,
        WIDTH=width,
        START=start,
        NORMS=weight is not None,
        ZERO_CENTRED=zero_centred,
        **shape,
    )
    return out


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(width: int, half: int) -> dict[str, int]:
    half_block = triton.next_power_of_2(half)
    rest_block = triton.next_power_of_2(max(1, width - 2 * half))
    rows = max(1, 4096 // (2 * half_block + rest_block))
    rows = triton.next_power_of_2(rows + 1) // 2
    return {
        "HALF": half,
        "HALF_BLOCK": half_block,
        "REST_BLOCK": rest_block,
        "ROWS": rows,
        "num_warps": 4,
    }
