"""The gradients of the scan's rows, chunk by chunk; the last kernel of ops/kernels/ssd.py.

In: the inputs, the gradient dy of the outputs, and for each chunk the state h that enters it and
the gradient g of the state that leaves it. Out: the gradients of x, dt, A, B, C and D. With
L_qk = exp(sum of logs after k up to q), 0 for k > q, l_k = exp(sum of logs after k), e_q = exp(sum
of logs up to q) and X = dy·xᵀ, a head of a chunk has

    dx_k   = Σ_q (C_q·B_k) L_qk dt_k dy_q + dt_k l_k (g·B_k) + D dy_k
    dC_q   = Σ_k X_qk L_qk dt_k B_k + e_q (dy_q·h)
    dB_k   = Σ_q X_qk L_qk dt_k C_q + dt_k l_k (x_k·g)
    ddt_k  = Σ_q X_qk (C_q·B_k) L_qk + v_k + A da_k       v_k = l_k x_k·g·B_k
    da_t   = Σ_{q≥t>k} Z_qk + Σ_{q≥t} u_q + Σ_{k<t} dt_k v_k + e_Q (g·h)

where da is the gradient of the log decays, Z_qk = X_qk (C_q·B_k) L_qk dt_k, u_q = e_q dy_q·h·C_q.
Each term of da is added on its own: as a difference of sums over rows and over columns, weak decays
next to strong ones would be lost. The first sums of dB and dC are linear in X L dt, which is
summed over the heads of a group first. dB and dC have a kernel of their own: together with the rest
they would not fit in registers. With one row, P = N = 1, B = C = dt = x = 1 and h = g = 0,
dy = 1 gives dx = dB = dC = ddt = 1 and da = 0.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.ops.kernels.ssd_forward import ROWS, power


class HasChunks(Protocol):
    """The layout of the rows."""

    @property
    def chunks(self) -> Tensor: ...


def row_gradients(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor | None,
    D: Tensor | None,
    *,
    dy: Tensor | None,
    steps: tuple[Tensor, Tensor],
    entering: Tensor,
    leaving: Tensor,
    layout: HasChunks,
) -> tuple[Tensor | None, ...]:
    """Of x, dt, A, B, C and D; dy: None where only final states are used."""
    rows, heads, width = x.shape
    groups, state = B.shape[1:]
    count = len(layout.chunks)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dB = torch.empty(B.shape, dtype=x.dtype, device=x.device)
    dC = None if dy is None else torch.empty_like(dB)
    ddt = torch.empty(rows, heads, dtype=torch.float32, device=x.device)
    # Of each chunk dA and dD, and of each group X·L·dt summed over its heads.
    sums = torch.empty(2, count, heads, dtype=torch.float32, device=x.device)
    d_scores = torch.empty(count, groups, ROWS, ROWS, dtype=x.dtype, device=x.device)
    sizes = {
        "RATIO": heads // groups, "WIDTH": width, "STATE": state,
        "ROWS": ROWS, "COLUMNS": power(width), "STATES": power(state), "DY": dy is not None,
    }  # fmt: skip
    stages = 2 if x.element_size() == 2 else 1
    grid = (count * groups,)
    if count:
        C_stride, dy_stride = (t.stride()[:2] if t is not None else (0, 0) for t in (C, dy))
        _gradients_kernel[grid](
            x, dy, A, B, C, D, *steps, entering, leaving, dx, ddt, d_scores, sums,
            layout.chunks, heads, groups, count,
            *x.stride()[:2], *dy_stride, *B.stride()[:2], *C_stride,
            SKIP=D is not None and dy is not None, num_warps=4, num_stages=stages, **sizes,
        )  # fmt: skip
        _keys_kernel[grid](
            x, leaving, steps[0], d_scores, C, dB, layout.chunks, heads, groups,
            *x.stride()[:2], *C_stride, OF_C=False, num_warps=4, num_stages=stages + 1, **sizes,
        )  # fmt: skip
        if dy is not None:
            _keys_kernel[grid](
                dy, entering, steps[0], d_scores, B, dC, layout.chunks, heads, groups,
                *dy_stride, *B.stride()[:2],
                OF_C=True, num_warps=4, num_stages=stages + 1, **sizes,
            )  # fmt: skip
    dA_H, dD_H = sums.sum(1)
    dD = None if D is None else (dD_H if dy is not None else torch.zeros_like(dD_H)).to(D.dtype)
    if C is not None and dC is None:
        dC = torch.zeros_like(C)
    return dx, ddt.to(dt.dtype), dA_H.to(A.dtype), dB, dC, dD


@triton.jit(do_not_specialize=["count"])
def _gradients_kernel(
    x_ptr, dy_ptr, A_ptr, B_ptr, C_ptr, D_ptr, steps_ptr, decay_ptr, entering_ptr, leaving_ptr,
    dx_ptr, ddt_ptr, d_scores_ptr, sums_ptr, chunks_ptr, heads, groups, count,
    x_row, x_head, dy_row, dy_head, B_row, B_group, C_row, C_group,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr,
    SKIP: tl.constexpr, DY: tl.constexpr,
):  # fmt: skip
    """One chunk, one group: its heads one after another."""
    chunk = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    first = tl.load(chunks_ptr + 2 * chunk).to(tl.int64)
    rows = tl.load(chunks_ptr + 2 * chunk + 1)
    row = tl.arange(0, ROWS)
    n = tl.arange(0, STATES)
    p = tl.arange(0, COLUMNS)
    t = (first + row)[:, None]
    of_keys = (row[:, None] < rows) & (n[None, :] < STATE)
    of_rows = (row[:, None] < rows) & (p[None, :] < WIDTH)
    # A chunk of 0 rows fills a table: no state enters or leaves it.
    of_state = (n[:, None] < STATE) & (p[None, :] < WIDTH) & (rows > 0)
    since = row[:, None] >= row[None, :]
    B = tl.load(B_ptr + t * B_row + group * B_group + n[None, :], mask=of_keys, other=0.0)
    if DY:
        C = tl.load(C_ptr + t * C_row + group * C_group + n[None, :], mask=of_keys, other=0.0)
        scores = tl.dot(C, tl.trans(B), input_precision="ieee")
        d_scores = tl.zeros((ROWS, ROWS), tl.float32)
        before = tl.where(row[:, None] < row[None, :], 1.0, 0.0).to(B.dtype)

    for each in range(RATIO):
        head = group * RATIO + each
        of_head = chunk * heads + head
        steps_at = steps_ptr + of_head * 3 * ROWS
        dt = tl.load(steps_at + row)
        high = tl.load(steps_at + ROWS + row)
        low = tl.load(steps_at + 2 * ROWS + row)
        last = tl.load(steps_at + 2 * ROWS - 1)
        last_low = tl.load(steps_at + 3 * ROWS - 1)
        to_end = tl.exp2((last - high) + (last_low - low))
        x = tl.load(x_ptr + t * x_row + head * x_head + p[None, :], mask=of_rows, other=0.0)
        at = of_head * WIDTH * STATE + n[:, None] * WIDTH + p[None, :]
        g = tl.load(leaving_ptr + at, mask=of_state, other=0.0)
        h = tl.load(entering_ptr + at, mask=of_state, other=0.0)
        decay = tl.load(decay_ptr + 2 * of_head) + tl.load(decay_ptr + 2 * of_head + 1)

        # What goes by the leaving state.
        dx = tl.dot(B, g, input_precision="ieee") * to_end[:, None]
        v = tl.sum(dx * x.to(tl.float32), 1)
        dx *= dt[:, None]
        kept = decay * tl.sum(tl.sum(g.to(tl.float32) * h.to(tl.float32), 1), 0)
        w = (dt * v)[:, None]
        if DY:
            dy = tl.load(dy_ptr + t * dy_row + head * dy_head + p[None, :], mask=of_rows, other=0.0)
            # By the entering state.
            read = tl.dot(C, h, input_precision="ieee")
            u = tl.exp2(high) * tl.sum(read * dy.to(tl.float32), 1)
            # Within the chunk.
            differences = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
            faded_dt = tl.exp2(tl.where(since, differences, float("-inf")))
            X = tl.dot(dy, tl.trans(x), input_precision="ieee")
            terms = X * scores * faded_dt
            ddt = tl.sum(terms, 0) + v
            faded_dt = faded_dt * dt[None, :]
            d_scores += X * faded_dt
            terms = tl.where(row[:, None] > row[None, :], terms * dt[None, :], 0.0)
            terms = tl.dot(terms.to(x.dtype), before, input_precision="ieee")
            da = tl.sum(tl.where(since, terms + u[:, None], w), 0) + kept
            shares = (scores * faded_dt).to(x.dtype)
            dx = tl.dot(tl.trans(shares), dy, acc=dx, input_precision="ieee")
            dD = tl.sum(tl.sum(tl.where(row[:, None] == row[None, :], X, 0.0), 1), 0)
            tl.store(sums_ptr + (count + chunk) * heads + head, dD)
            if SKIP:
                dx += tl.load(D_ptr + head).to(tl.float32) * dy.to(tl.float32)
        else:
            da = tl.sum(tl.where(since, 0.0, w), 0) + kept
            ddt = v
        ddt += tl.load(A_ptr + head).to(tl.float32) * da
        tl.store(sums_ptr + of_head, tl.sum(da * dt, 0))
        tl.store(ddt_ptr + (first + row) * heads + head, ddt, mask=row < rows)
        at = dx_ptr + (t * heads + head) * WIDTH + p[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=of_rows)

    if DY:
        at = (chunk * groups + group) * ROWS * ROWS + row[:, None] * ROWS + row[None, :]
        tl.store(d_scores_ptr + at, d_scores.to(d_scores_ptr.dtype.element_ty))


@triton.jit
def _keys_kernel(
    rows_ptr, states_ptr, steps_ptr, d_scores_ptr, others_ptr, out_ptr, chunks_ptr, heads, groups,
    rows_row, rows_head, others_row, others_group,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr,
    OF_C: tl.constexpr, DY: tl.constexpr,
):  # fmt: skip
    """One chunk, one group: dC from dy, h and B, or dB from x, g and C."""
    chunk = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    first = tl.load(chunks_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(chunks_ptr + 2 * chunk + 1)
    row = tl.arange(0, ROWS)
    n = tl.arange(0, STATES)
    p = tl.arange(0, COLUMNS)
    t = (first + row)[:, None]
    of_keys = (row[:, None] < count) & (n[None, :] < STATE)
    of_rows = (row[:, None] < count) & (p[None, :] < WIDTH)
    of_state = (n[:, None] < STATE) & (p[None, :] < WIDTH)
    total = tl.zeros((ROWS, STATES), tl.float32)
    for each in range(RATIO):
        head = group * RATIO + each
        of_head = chunk * heads + head
        steps_at = steps_ptr + of_head * 3 * ROWS
        high = tl.load(steps_at + ROWS + row)
        if OF_C:
            weight = tl.exp2(high)
        else:
            low = tl.load(steps_at + 2 * ROWS + row)
            last = tl.load(steps_at + 2 * ROWS - 1)
            last_low = tl.load(steps_at + 3 * ROWS - 1)
            weight = tl.load(steps_at + row) * tl.exp2((last - high) + (last_low - low))
        at = rows_ptr + t * rows_row + head * rows_head + p[None, :]
        values = tl.load(at, mask=of_rows, other=0.0)
        at = states_ptr + of_head * WIDTH * STATE + n[:, None] * WIDTH + p[None, :]
        state = tl.load(at, mask=of_state, other=0.0)
        values = (values.to(tl.float32) * weight[:, None]).to(values.dtype)
        total = tl.dot(values, tl.trans(state), acc=total, input_precision="ieee")
    if DY:
        at = (chunk * groups + group) * ROWS * ROWS + row[:, None] * ROWS + row[None, :]
        d_scores = tl.load(d_scores_ptr + at)
        at = others_ptr + t * others_row + group * others_group + n[None, :]
        others = tl.load(at, mask=of_keys, other=0.0)
        if not OF_C:
            d_scores = tl.trans(d_scores)
        total = tl.dot(d_scores, others, acc=total, input_precision="ieee")
    at = out_ptr + (t * groups + group) * STATE + n[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=of_keys)
