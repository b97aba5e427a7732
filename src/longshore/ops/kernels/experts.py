"""A layer of experts on a GPU: Triton kernels around torch's grouped products.

In: tokens (T, C), their weights (T, K), the order of their rows by expert, and the experts'
parameters. Out: (T, C). As in ops/experts.py, M = T·K rows are sorted by expert, and those of no
expert are past the last offset. Two tokens, 3 experts, ids [[2, 0], [3, 1]], of which 3 is none:

    order     1 3 0 2         rows by expert: t0→0  t1→1  t0→2 | t1→none
    inverse   [[2, 0], [3, 1]]     offsets 1 2 3, so places of 3 or more are never read nor written

The routing weight multiplies the inner activation, so no pass over (M, C) weighs rows:

    rows (M, C)  →  hidden (M, 2F)  →  silu(gate)·up·weight (M, F)  →  outputs (M, C)  →  sum over K

With a limit, gate and up are clipped before that, as ops/pointwise.py:clipped does it.

For backward only the tokens and `hidden` are kept; rows and inner activations are computed again.
What lies past the last offset is uninitialised memory everywhere. Sums are in float32, in the
order of K; no program adds to what another writes.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

SPREAD_BLOCK = 2048
"""Channels of a token that one program copies to its rows."""
SUM_BLOCK = 1024
"""Channels of a token that one program sums over its rows."""
INNER_BLOCK = 1024
"""Channels inside an expert that one program handles at a time."""
CLEAR_BLOCK, CLEAR_PROGRAMS = 4096, 16
"""Numbers that a program clears at a time, and programs for each expert."""


def sorted_mlp(
    x_TC: Tensor,
    weights_TK: Tensor,
    order: Tensor,
    offsets_E: Tensor,
    *,
    gate_up_E2FC: Tensor,
    down_ECF: Tensor,
    limit: float = 0.0,
) -> Tensor:
    """(T, C): the weighted sum over each token's experts, in x's dtype."""
    return _SortedMLP.apply(
        x_TC, weights_TK, order, offsets_E, gate_up_E2FC, down_ECF, limit or math.inf
    )


class _SortedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        weights_TK: Tensor,
        order: Tensor,
        offsets_E: Tensor,
        gate_up_E2FC: Tensor,
        down_ECF: Tensor,
        limit: float,
    ) -> Tensor:
        x_TC, weights_TK = x_TC.contiguous(), weights_TK.contiguous()
        inverse_TK = _inverse(order).view(weights_TK.shape)
        gate_up, down = gate_up_E2FC.contiguous(), down_ECF.contiguous()
        rows_MC = _spread(x_TC, inverse_TK, offsets_E)
        hidden_M2F = grouped_mm(rows_MC, gate_up.transpose(1, 2), offs=offsets_E)
        del rows_MC
        inner_MF = _activate(hidden_M2F, weights_TK, order, offsets_E, limit)
        outputs_MC = grouped_mm(inner_MF, down.transpose(1, 2), offs=offsets_E)
        ctx.save_for_backward(
            x_TC, weights_TK, order, inverse_TK, offsets_E, hidden_M2F, gate_up_E2FC, down_ECF
        )
        ctx.limit = limit
        return _sum_rows(outputs_MC, inverse_TK, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, inverse, offsets, hidden, gate_up, down = ctx.saved_tensors
        wants_x, wants_weights, _, _, wants_gate_up, wants_down, _ = ctx.needs_input_grad
        dx = dgate_up = ddown = None
        doutputs_MC = _spread(grad_TC.contiguous(), inverse, offsets)
        dinner_MF = grouped_mm(doutputs_MC, down.contiguous(), offs=offsets)
        inner_MF, dhidden_M2F, dweights_TK = _activate_backward(
            hidden, weights, order, offsets, dinner_MF, ctx.limit
        )
        del dinner_MF
        if wants_down:
            ddown = _weight_gradient(doutputs_MC, inner_MF, offsets)
        del doutputs_MC, inner_MF
        if wants_gate_up:
            dgate_up = _weight_gradient(dhidden_M2F, _spread(x, inverse, offsets), offsets)
        if wants_x:
            dx_MC = grouped_mm(dhidden_M2F, gate_up.contiguous(), offs=offsets)
            dx = _sum_rows(dx_MC, inverse, offsets)
        return dx, dweights_TK if wants_weights else None, None, None, dgate_up, ddown, None


def _inverse(order: Tensor) -> Tensor:
    """int32 (M): where each row by token is among the rows by expert."""
    places = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter_(0, order, places)


def _weight_gradient(grad_MA: Tensor, rows_MB: Tensor, offsets_E: Tensor) -> Tensor:
    """(E, A, B): of each expert the product of its rows; 0 for an expert without rows."""
    product_EAB = grouped_mm(grad_MA.t(), rows_MB, offs=offsets_E)
    # Not every device's kernel writes the product of no rows.
    grid = (len(offsets_E), CLEAR_PROGRAMS)
    size = product_EAB[0].numel()
    _clear_empty_kernel[grid](
        product_EAB, offsets_E, size, PROGRAMS=CLEAR_PROGRAMS, BLOCK=CLEAR_BLOCK, num_warps=4
    )
    return product_EAB


def _spread(x_TC: Tensor, inverse_TK: Tensor, offsets_E: Tensor) -> Tensor:
    """(M, C): each token's row at all its places."""
    tokens, width = x_TC.shape
    rows_MC = x_TC.new_empty(inverse_TK.numel(), width)
    block = min(SPREAD_BLOCK, triton.next_power_of_2(width))
    _spread_kernel[tokens, triton.cdiv(width, block)](
        x_TC, rows_MC, inverse_TK, offsets_E,
        WIDTH=width, TOP_K=inverse_TK.shape[1], EXPERTS=len(offsets_E), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return rows_MC


def _sum_rows(rows_MC: Tensor, inverse_TK: Tensor, offsets_E: Tensor) -> Tensor:
    """(T, C): for each token the sum of its rows, k by k, without those of no expert."""
    tokens, top_k = inverse_TK.shape
    width = rows_MC.shape[1]
    y_TC = rows_MC.new_empty(tokens, width)
    block = min(SUM_BLOCK, triton.next_power_of_2(width))
    _sum_rows_kernel[tokens, triton.cdiv(width, block)](
        rows_MC, y_TC, inverse_TK, offsets_E,
        WIDTH=width, TOP_K=top_k, EXPERTS=len(offsets_E), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y_TC


def _activate(
    hidden_M2F: Tensor, weights_TK: Tensor, order: Tensor, offsets_E: Tensor, limit: float
) -> Tensor:
    """(M, F): silu(gate)·up·weight of each row."""
    rows, inner = len(hidden_M2F), hidden_M2F.shape[1] // 2
    inner_MF = hidden_M2F.new_empty(rows, inner)
    block = min(INNER_BLOCK, triton.next_power_of_2(inner))
    _activate_kernel[rows, triton.cdiv(inner, block)](
        hidden_M2F, weights_TK, order, offsets_E, inner_MF, limit,
        INNER=inner, EXPERTS=len(offsets_E), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return inner_MF


def _activate_backward(
    hidden_M2F: Tensor,
    weights_TK: Tensor,
    order: Tensor,
    offsets_E: Tensor,
    dinner_MF: Tensor,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate)·up·weight (M, F) again, and the gradients of hidden (M, 2F) and weights (T, K)."""
    rows, inner = dinner_MF.shape
    inner_MF, dhidden_M2F = torch.empty_like(dinner_MF), torch.empty_like(hidden_M2F)
    dweights_TK = torch.empty_like(weights_TK)
    block = min(INNER_BLOCK, triton.next_power_of_2(inner))
    _activate_backward_kernel[(rows,)](
        hidden_M2F, weights_TK, order, offsets_E, dinner_MF, inner_MF, dhidden_M2F, dweights_TK,
        limit, INNER=inner, EXPERTS=len(offsets_E), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return inner_MF, dhidden_M2F, dweights_TK


@triton.jit
def _spread_kernel(
    x_ptr, rows_ptr, inverse_ptr, offsets_ptr,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token, one block of channels: read once, written to each of its rows."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < WIDTH
    stop = tl.load(offsets_ptr + EXPERTS - 1)
    x = tl.load(x_ptr + token * WIDTH + channels, mask=inside)
    for k in tl.static_range(TOP_K):
        place = tl.load(inverse_ptr + token * TOP_K + k)
        at = rows_ptr + place.to(tl.int64) * WIDTH + channels
        tl.store(at, x, mask=inside & (place < stop))


@triton.jit
def _sum_rows_kernel(
    rows_ptr, y_ptr, inverse_ptr, offsets_ptr,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token, one block of channels: the sum of its rows in float32."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < WIDTH
    stop = tl.load(offsets_ptr + EXPERTS - 1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(inverse_ptr + token * TOP_K + k)
        at = rows_ptr + place.to(tl.int64) * WIDTH + channels
        total += tl.load(at, mask=inside & (place < stop), other=0.0).to(tl.float32)
    tl.store(y_ptr + token * WIDTH + channels, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate_kernel(
    hidden_ptr, weights_ptr, order_ptr, offsets_ptr, inner_ptr, limit,
    INNER: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, one block of its inner channels."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets_ptr + EXPERTS - 1):
        channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channels < INNER
        weight = tl.load(weights_ptr + tl.load(order_ptr + row)).to(tl.float32)
        at = hidden_ptr + row * (2 * INNER) + channels
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32)
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        inner = gate * tl.sigmoid(gate) * up * weight
        to = inner_ptr + row * INNER + channels
        tl.store(to, inner.to(inner_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate_backward_kernel(
    hidden_ptr, weights_ptr, order_ptr, offsets_ptr, dinner_ptr, inner_ptr, dhidden_ptr,
    dweights_ptr, limit, INNER: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its inner activation again, the gradients of gate and up, and of its weight."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(order_ptr + row)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    if row < tl.load(offsets_ptr + EXPERTS - 1):
        weight = tl.load(weights_ptr + place).to(tl.float32)
        for start in range(0, INNER, BLOCK):
            channels = start + tl.arange(0, BLOCK)
            inside = channels < INNER
            at = row * (2 * INNER) + channels
            gate = tl.load(hidden_ptr + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(hidden_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
            gate_moves, up_moves = gate <= limit, tl.abs(up) <= limit
            gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
            to = row * INNER + channels
            dinner = tl.load(dinner_ptr + to, mask=inside, other=0.0).to(tl.float32)
            open_ = tl.sigmoid(gate)
            silu = gate * open_
            dweight += silu * up * dinner
            dgate = dinner * weight * up * (open_ + silu * (1.0 - open_))
            dgate = tl.where(gate_moves, dgate, 0.0)
            dup = tl.where(up_moves, dinner * weight * silu, 0.0)
            inner = (silu * up * weight).to(inner_ptr.dtype.element_ty)
            tl.store(inner_ptr + to, inner, mask=inside)
            tl.store(dhidden_ptr + at, dgate.to(dhidden_ptr.dtype.element_ty), mask=inside)
            tl.store(dhidden_ptr + at + INNER, dup.to(dhidden_ptr.dtype.element_ty), mask=inside)
    tl.store(dweights_ptr + place, tl.sum(dweight).to(dweights_ptr.dtype.element_ty))


@triton.jit
def _clear_empty_kernel(
    product_ptr, offsets_ptr, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Zeros for an expert without rows; programs of all others end at once."""
    expert = tl.program_id(0)
    stop = tl.load(offsets_ptr + expert)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    if start == stop:
        first = product_ptr + expert.to(tl.int64) * size
        for block in range(tl.program_id(1) * BLOCK, size, PROGRAMS * BLOCK):
            numbers = block + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], dtype=product_ptr.dtype.element_ty)
            tl.store(first + numbers, zeros, mask=numbers < size)
