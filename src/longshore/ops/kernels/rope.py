"""Rotary embeddings in Triton, with the norm of each head before them in the same kernel.

In and out: as ops/pointwise.py; x may be a view with strides, the last dim contiguous. A row is one
head of one token: with 16 heads row 35 is head 3 of token 2. Its dims are three parts: `first` and
`second`, which rotate together, and the rest. For D = 192, R = 32 and start 128 these are dims 128
to 159, 160 to 191 and 0 to 127.

Queries and keys go together: with 16 heads of queries and 8 of keys the first two thirds of the
programs take the queries, the others the keys. A single tensor is a q without k.

For backward a rotation keeps only its tables, a norm x as well; the root mean square is computed
again. The weight's gradient is summed as in kernels/norm.py.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

from longshore.ops.kernels.launch import Kernel
from longshore.ops.kernels.norm import blocks, column_sums, empty, programs


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
    START: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """The columns of a table and of the rest, and which of them there are."""
    turn = tl.arange(0, HALF_BLOCK)[None, :]
    rest = tl.arange(0, REST_BLOCK)[None, :]
    is_rest = rest < WIDTH - 2 * HALF
    if START == 0:
        rest += 2 * HALF
    elif START + 2 * HALF < WIDTH:
        rest = tl.where(rest < START, rest, rest + 2 * HALF)
    return turn, rest, turn < HALF, is_rest


@triton.jit
def _forward_rows(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, tile, rows, x_token, x_head, eps, sign,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr, NORMS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
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


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _rope_forward(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, tokens,
    q_token, q_head, k_token, k_head, eps, sign, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, ROWS: tl.constexpr, NORMS: tl.constexpr, ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(tokens * Q_HEADS, ROWS)
    if tile < q_tiles:
        _forward_rows(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, tile, tokens * Q_HEADS, q_token,
            q_head, eps, sign, Q_HEADS, WIDTH, START, HALF, HALF_BLOCK, REST_BLOCK, ROWS, NORMS,
            ZERO_CENTRED,
        )  # fmt: skip
    elif K_HEADS > 0:
        _forward_rows(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_out_ptr, tile - q_tiles, tokens * K_HEADS,
            k_token, k_head, eps, sign, K_HEADS, WIDTH, START, HALF, HALF_BLOCK, REST_BLOCK, ROWS,
            NORMS, ZERO_CENTRED,
        )  # fmt: skip


@triton.jit
def _backward_rows(
    dout_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, part, program, count, rows,
    dout_token, dout_head, x_token, x_head, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    turn, rest, is_turn, is_rest = _columns(0, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
    second_turn = HALF + turn
    turn_scale = _scale(weight_ptr, turn, is_turn, ZERO_CENTRED)
    second_scale = _scale(weight_ptr, second_turn, is_turn, ZERO_CENTRED)
    rest_scale = _scale(weight_ptr, rest, is_rest, ZERO_CENTRED)
    dfirst = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    dsecond = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    dothers = tl.zeros((ROWS, REST_BLOCK), tl.float32)
    for start in range(program * ROWS, rows, count * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        token, head = row // HEADS, row % HEADS
        turns, rests = (row < rows) & is_turn, (row < rows) & is_rest
        x_at, dout_at = token * x_token + head * x_head, token * dout_token + head * dout_head
        first = _part(x_ptr, x_at + turn, turns)
        second = _part(x_ptr, x_at + second_turn, turns)
        others = _part(x_ptr, x_at + rest, rests)
        drotated = _part(dout_ptr, dout_at + turn, turns)
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
        tl.store(dx_at + turn, (rstd * (d_first - first * along)).to(dtype), turns)
        tl.store(dx_at + second_turn, (rstd * (d_second - second * along)).to(dtype), turns)
        tl.store(dx_at + rest, (rstd * (d_others - others * along)).to(dtype), rests)
    part_ptr = partial_ptr + part * WIDTH
    tl.store(part_ptr + turn, tl.sum(dfirst, 0, keep_dims=True), is_turn)
    tl.store(part_ptr + second_turn, tl.sum(dsecond, 0, keep_dims=True), is_turn)
    tl.store(part_ptr + rest, tl.sum(dothers, 0, keep_dims=True), is_rest)


@Kernel
@triton.jit(do_not_specialize=["q_programs", "tokens"])
def _rope_backward(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dq_ptr,
    dk_ptr, partial_ptr, q_programs, tokens, dq_token, dq_head, dk_token, dk_head, q_token, q_head,
    k_token, k_head, eps, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """The first q_programs walk over the rows of the queries, the others over those of the keys."""
    part = tl.program_id(0)
    if part < q_programs:
        _backward_rows(
            dq_out_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, dq_ptr, partial_ptr, part, part,
            q_programs, tokens * Q_HEADS, dq_token, dq_head, q_token, q_head, eps, Q_HEADS, WIDTH,
            HALF, HALF_BLOCK, REST_BLOCK, ROWS, ZERO_CENTRED,
        )  # fmt: skip
    elif K_HEADS > 0:
        _backward_rows(
            dk_out_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, dk_ptr, partial_ptr, part,
            part - q_programs, tl.num_programs(0) - q_programs, tokens * K_HEADS, dk_token, dk_head,
            k_token, k_head, eps, K_HEADS, WIDTH, HALF, HALF_BLOCK, REST_BLOCK, ROWS, ZERO_CENTRED,
        )  # fmt: skip


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, start: int
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(cos, sin)
        ctx.start = start
        return _rotated(q, k, cos, sin, start=start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_rotated(dq, dk, cos, sin, start=ctx.start, sign=-1.0), None, None, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        q_weight: Tensor,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        zero_centred: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q_weight = q_weight.contiguous()
        k_weight = None if k_weight is None else k_weight.contiguous()
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.zero_centred = eps, zero_centred
        weights = q_weight, k_weight
        return _rotated(q, k, cos, sin, weights=weights, eps=eps, zero_centred=zero_centred)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        q, dq_out = _unit_stride(q), _unit_stride(dq_out)
        dq, dk, k_heads = empty(q), None, 0
        tokens, q_heads, width = q.shape
        if k is not None and dk_out is not None:
            k, dk_out = _unit_stride(k), _unit_stride(dk_out)
            dk, k_heads = empty(k), k.shape[1]
        shape = _tile(width, cos.shape[1])
        q_programs, count = _shares(q, k_heads, shape["ROWS"])
        partial = q.new_empty(count, width, dtype=torch.float32)
        # Without keys the kernel gets the queries' tensors in their place, and does not read them.
        dk_in, k_in = dq_out if dk_out is None else dk_out, q if k is None else k
        _rope_backward[(count,)](
            dq_out, dk_in, q, k_in, q_weight, q_weight if k_weight is None else k_weight, cos, sin,
            dq, dq if dk is None else dk, partial, q_programs, tokens, *dq_out.stride()[:2],
            *dk_in.stride()[:2], *q.stride()[:2], *k_in.stride()[:2], ctx.eps,
            Q_HEADS=q_heads, K_HEADS=k_heads, WIDTH=width, ZERO_CENTRED=ctx.zero_centred, **shape,
        )  # fmt: skip
        dweights: tuple[Tensor | None, ...] = (None, None)
        if any(ctx.needs_input_grad[2:4]):
            middle = None if dk is None else q_programs
            dweights = (*column_sums(partial, q_weight.dtype, middle=middle), None)
        return dq, dk, *dweights[:2], None, None, None, None


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, start: int = 0
) -> tuple[Tensor, Tensor | None]:
    """k: None for a single tensor, as below."""
    return _Rotate.apply(q, k, cos.contiguous(), sin.contiguous(), start)


def norm_rotate(
    q: Tensor, k: Tensor | None, weights: tuple[Tensor, Tensor | None], eps: float,
    cos: Tensor, sin: Tensor, zero_centred: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    cos, sin = cos.contiguous(), sin.contiguous()
    return _NormRotate.apply(q, k, *weights, eps, cos, sin, zero_centred)


def _rotated(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    start: int = 0,
    sign: float = 1.0,
    weights: tuple[Tensor, Tensor | None] | None = None,
    eps: float = 0.0,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """sign: −1 rotates back."""
    q = _unit_stride(q)
    q_out, k_out, k_heads = empty(q), None, 0
    if k is not None:
        k = _unit_stride(k)
        k_out, k_heads = empty(k), k.shape[1]
    q_weight, k_weight = (q, None) if weights is None else weights
    tokens, q_heads, width = q.shape
    shape = _tile(width, cos.shape[1])
    tiles = blocks(tokens * q_heads, shape["ROWS"]) + blocks(tokens * k_heads, shape["ROWS"])
    k_in = q if k is None else k
    _rope_forward[(tiles,)](
        q, k_in, q_weight, q_weight if k_weight is None else k_weight, cos, sin,
        q_out, q_out if k_out is None else k_out, tokens, *q.stride()[:2], *k_in.stride()[:2],
        eps, sign, Q_HEADS=q_heads, K_HEADS=k_heads, WIDTH=width, START=start,
        NORMS=weights is not None, ZERO_CENTRED=zero_centred, **shape,
    )  # fmt: skip
    return q_out, k_out


def _shares(q: Tensor, k_heads: int, rows: int) -> tuple[int, int]:
    """Programs for the queries and for both, by their heads; the same for every call."""
    tokens, q_heads, _ = q.shape
    q_tiles, k_tiles = blocks(tokens * q_heads, rows), blocks(tokens * k_heads, rows)
    count = programs(q.device, tiles=q_tiles + k_tiles)
    if not k_heads:
        return count, count
    q_programs = max(1, count * q_heads // (q_heads + k_heads))
    return q_programs, max(count, q_programs + 1)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache
def _tile(width: int, half: int) -> dict[str, int]:
    half_block = triton.next_power_of_2(half)
    rest_block = triton.next_power_of_2(max(1, width - 2 * half))
    rows = max(1, 4096 // (2 * half_block + rest_block))
    rows = triton.next_power_of_2(rows + 1) // 2
    sizes = {"HALF": half, "HALF_BLOCK": half_block, "REST_BLOCK": rest_block, "ROWS": rows}
    return {**sizes, "num_warps": 4}
