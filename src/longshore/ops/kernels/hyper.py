"""The rows of hyper-connections as Triton kernels.

In and out: as in ops/pointwise.py. N residuals are a few rows, so a program has all of them for its
channels, and sums over channels stay in one program: no additions by several programs, the same
bits in every run.

    project     tokens by blocks of channels times the weight; the sum of squares in the same pass.
                Backward: the rows' gradient, and the weight's as sums over parts of the tokens
    collapse    a token, blocks of its channels
    expand      the same; backward reads rows and gradients once for all four gradients

All sums are in float32. A row of bfloat16 times a float32 weight is computed by three products of
TF32, which lose nothing that float32 holds.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.kernels.launch import Kernel, power

TOKENS, CHANNELS = 32, 64
"""Tokens and channels of a program's block in products."""
WIDE = 1024
"""Channels of a program elsewhere."""
PART_TOKENS, MOST_PARTS = 2048, 32
"""Tokens of each part of the weight's gradient, at least; and parts."""


class _Project(torch.autograd.Function):
    """(T, M) in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, weight = rows.contiguous(), weight.contiguous()
        (tokens, size), count = rows.shape, len(weight)
        sums = torch.empty(tokens, count, dtype=torch.float32, device=rows.device)
        inverse = torch.empty(tokens, 1, dtype=torch.float32, device=rows.device)
        _project_kernel[(triton.cdiv(tokens, TOKENS),)](
            rows, weight, sums, inverse, tokens, size, eps,
            COUNT=count, PADDED=power(count), TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(rows, weight, sums, inverse)
        return sums * inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, sums, inverse = ctx.saved_tensors
        (tokens, size), count = rows.shape, len(weight)
        # Of sums, and of what each row is multiplied by for its root mean square.
        dsums = (grad * inverse).contiguous()
        by_row = (grad * sums).sum(1) * inverse.squeeze(1).pow(3) / -size
        drows = torch.empty_like(rows)
        sizes = {"COUNT": count, "PADDED": power(count), "TOKENS": TOKENS, "CHANNELS": CHANNELS}
        blocks = triton.cdiv(size, CHANNELS)
        _rows_kernel[(triton.cdiv(tokens, TOKENS), blocks)](
            rows, weight, dsums, by_row, drows, tokens, size, num_warps=4, **sizes
        )
        parts = min(MOST_PARTS, triton.cdiv(tokens, PART_TOKENS))
        each = triton.cdiv(triton.cdiv(tokens, parts), TOKENS) * TOKENS
        dweight = torch.empty(parts, count, size, dtype=torch.float32, device=rows.device)
        _weight_kernel[(blocks, parts)](
            rows, dsums, dweight, tokens, size, each, num_warps=4, **sizes
        )
        return drows, dweight.sum(0).to(weight.dtype), None


class _Collapse(torch.autograd.Function):
    """(T, C) in the rows' dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pre: Tensor) -> Tensor:
        rows, pre = rows.contiguous(), pre.contiguous()
        (tokens, size), count = rows.shape, pre.shape[1]
        out = rows.new_empty(tokens, size // count)
        _collapse_kernel[(tokens, triton.cdiv(size // count, WIDE))](
            rows, pre, out, size // count, COUNT=count, PADDED=_pairs(count), WIDE=WIDE, num_warps=4
        )
        ctx.save_for_backward(rows, pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, pre = ctx.saved_tensors
        (tokens, size), count = rows.shape, pre.shape[1]
        drows, dpre = torch.empty_like(rows), torch.empty_like(pre)
        _uncollapse_kernel[(tokens,)](
            rows, pre, grad.contiguous(), drows, dpre, size // count,
            COUNT=count, PADDED=_pairs(count), WIDE=WIDE, num_warps=4,
        )  # fmt: skip
        return drows, dpre


class _Expand(torch.autograd.Function):
    """(T, N·C) in the rows' dtype."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        output, rows, post, mix = (x.contiguous() for x in (output, rows, post, mix))
        tokens, width = output.shape
        out = torch.empty_like(rows)
        _expand_kernel[(tokens, triton.cdiv(width, WIDE))](
            output, rows, post, mix, out, width,
            COUNT=post.shape[1], PADDED=_pairs(post.shape[1]), WIDE=WIDE, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(output, rows, post, mix)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        output, rows, post, mix = ctx.saved_tensors
        tokens, width = output.shape
        grads = tuple(torch.empty_like(x) for x in (output, rows, post, mix))
        _unexpand_kernel[(tokens,)](
            output, rows, post, mix, grad.contiguous(), *grads, width,
            COUNT=post.shape[1], PADDED=_pairs(post.shape[1]), WIDE=WIDE, num_warps=4,
        )  # fmt: skip
        return grads


project, collapse, expand = _Project.apply, _Collapse.apply, _Expand.apply


def _pairs(number: int) -> int:
    return 1 << max(1, (number - 1).bit_length())


@triton.jit
def _block(ptr, row, column, rows, columns):
    """(row, column) of a matrix, in float32; 0 outside."""
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = ptr + row[:, None].to(tl.int64) * columns + column[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _project_jit(
    rows_ptr, weight_ptr, sums_ptr, inverse_ptr, tokens, size, eps,
    COUNT: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A block of tokens, all channels."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    number = tl.arange(0, PADDED)
    sums = tl.zeros((TOKENS, PADDED), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, size, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        x = _block(rows_ptr, token, channel, tokens, size)
        weight = _block(weight_ptr, number, channel, COUNT, size)
        sums = tl.dot(x, tl.trans(weight), acc=sums, input_precision="tf32x3")
        squares += tl.sum(x * x, 1)
    inside = token < tokens
    tl.store(inverse_ptr + token, 1.0 / tl.sqrt(squares / size + eps), mask=inside)
    at = sums_ptr + token[:, None].to(tl.int64) * COUNT + number[None, :]
    tl.store(at, sums, mask=inside[:, None] & (number[None, :] < COUNT))


@triton.jit
def _rows_jit(
    rows_ptr, weight_ptr, dsums_ptr, by_row_ptr, drows_ptr, tokens, size,
    COUNT: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of tokens and channels."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, PADDED)
    dsums = _block(dsums_ptr, token, number, tokens, COUNT)
    weight = _block(weight_ptr, number, channel, COUNT, size)
    x = _block(rows_ptr, token, channel, tokens, size)
    by_row = tl.load(by_row_ptr + token, mask=token < tokens, other=0.0)
    dx = tl.dot(dsums, weight, acc=x * by_row[:, None], input_precision="tf32x3")
    inside = (token[:, None] < tokens) & (channel[None, :] < size)
    at = drows_ptr + token[:, None].to(tl.int64) * size + channel[None, :]
    tl.store(at, dx.to(drows_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weight_jit(
    rows_ptr, dsums_ptr, dweight_ptr, tokens, size, each,
    COUNT: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A block of channels of the weight's gradient, from `each` tokens."""
    part = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, PADDED)
    dweight = tl.zeros((PADDED, CHANNELS), tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, tokens), TOKENS):
        token = start + tl.arange(0, TOKENS)
        dsums = _block(dsums_ptr, token, number, tokens, COUNT)
        x = _block(rows_ptr, token, channel, tokens, size)
        dweight = tl.dot(tl.trans(dsums), x, acc=dweight, input_precision="tf32x3")
    at = dweight_ptr + (part * COUNT + number[:, None]).to(tl.int64) * size + channel[None, :]
    tl.store(at, dweight, mask=(number[:, None] < COUNT) & (channel[None, :] < size))


@triton.jit
def _collapse_jit(
    rows_ptr, pre_ptr, out_ptr, width,
    COUNT: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A token, a block of its channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    number = tl.arange(0, PADDED)
    x = _block(rows_ptr + token * COUNT * width, number, channel, COUNT, width)
    pre = tl.load(pre_ptr + token * COUNT + number, mask=number < COUNT, other=0.0)
    row = tl.sum(x * pre[:, None].to(tl.float32), 0)
    to = out_ptr + token * width + channel
    tl.store(to, row.to(out_ptr.dtype.element_ty), mask=channel < width)


@triton.jit
def _uncollapse_jit(
    rows_ptr, pre_ptr, grad_ptr, drows_ptr, dpre_ptr, width,
    COUNT: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A token, all channels."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    pre = tl.load(pre_ptr + token * COUNT + number, mask=number < COUNT, other=0.0).to(tl.float32)
    dpre = tl.zeros((PADDED,), tl.float32)
    for start in range(0, width, WIDE):
        channel = start + tl.arange(0, WIDE)
        x = _block(rows_ptr + token * COUNT * width, number, channel, COUNT, width)
        inside = channel < width
        grad = tl.load(grad_ptr + token * width + channel, mask=inside, other=0.0).to(tl.float32)
        dpre += tl.sum(x * grad[None, :], 1)
        at = drows_ptr + (token * COUNT + number[:, None]) * width + channel[None, :]
        drows = pre[:, None] * grad[None, :]
        kept = (number[:, None] < COUNT) & inside[None, :]
        tl.store(at, drows.to(drows_ptr.dtype.element_ty), mask=kept)
    to = dpre_ptr + token * COUNT + number
    tl.store(to, dpre.to(dpre_ptr.dtype.element_ty), mask=number < COUNT)


@triton.jit
def _expand_jit(
    output_ptr, rows_ptr, post_ptr, mix_ptr, out_ptr, width,
    COUNT: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A token, a block of its channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    number = tl.arange(0, PADDED)
    inside = channel < width
    x = _block(rows_ptr + token * COUNT * width, number, channel, COUNT, width)
    output = tl.load(output_ptr + token * width + channel, mask=inside, other=0.0).to(tl.float32)
    for to in tl.static_range(COUNT):
        post = tl.load(post_ptr + token * COUNT + to).to(tl.float32)
        at = mix_ptr + (token * COUNT + number) * COUNT + to
        mix = tl.load(at, mask=number < COUNT, other=0.0).to(tl.float32)
        row = post * output + tl.sum(mix[:, None] * x, 0)
        there = out_ptr + (token * COUNT + to) * width + channel
        tl.store(there, row.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _unexpand_jit(
    output_ptr, rows_ptr, post_ptr, mix_ptr, grad_ptr,
    doutput_ptr, drows_ptr, dpost_ptr, dmix_ptr, width,
    COUNT: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A token, all channels: rows and gradients are read once."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    is_row = number < COUNT
    post = tl.load(post_ptr + token * COUNT + number, mask=is_row, other=0.0).to(tl.float32)
    dpost = tl.zeros((PADDED,), tl.float32)
    dmix = tl.zeros((PADDED, PADDED), tl.float32)
    for start in range(0, width, WIDE):
        channel = start + tl.arange(0, WIDE)
        inside = channel < width
        grad = _block(grad_ptr + token * COUNT * width, number, channel, COUNT, width)
        at = token * width + channel
        output = tl.load(output_ptr + at, mask=inside, other=0.0).to(tl.float32)
        doutput = tl.sum(post[:, None] * grad, 0)
        tl.store(doutput_ptr + at, doutput.to(doutput_ptr.dtype.element_ty), mask=inside)
        dpost += tl.sum(grad * output[None, :], 1)
        for of in tl.static_range(COUNT):
            here = (token * COUNT + of) * width + channel
            x = tl.load(rows_ptr + here, mask=inside, other=0.0).to(tl.float32)
            mix = tl.load(mix_ptr + (token * COUNT + of) * COUNT + number, mask=is_row, other=0.0)
            drow = tl.sum(mix[:, None].to(tl.float32) * grad, 0)
            tl.store(drows_ptr + here, drow.to(drows_ptr.dtype.element_ty), mask=inside)
            of_row = tl.sum(grad * x[None, :], 1)
            dmix += tl.where(number[:, None] == of, of_row[None, :], 0.0)
    to = dpost_ptr + token * COUNT + number
    tl.store(to, dpost.to(dpost_ptr.dtype.element_ty), mask=is_row)
    to = dmix_ptr + (token * COUNT + number[:, None]) * COUNT + number[None, :]
    kept = is_row[:, None] & is_row[None, :]
    tl.store(to, dmix.to(dmix_ptr.dtype.element_ty), mask=kept)


_project_kernel, _rows_kernel, _weight_kernel = map(Kernel, (_project_jit, _rows_jit, _weight_jit))
_collapse_kernel, _uncollapse_kernel = map(Kernel, (_collapse_jit, _uncollapse_jit))
_expand_kernel, _unexpand_kernel = map(Kernel, (_expand_jit, _unexpand_jit))
