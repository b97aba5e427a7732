"""Mamba2's state-space scan by Triton kernels.

In: rows, as in ops/ssd.py, with their strides; only the last dim must be contiguous. Out: rows, the
final states, and in backward the gradient of every input. Sequences of 3 and 70 rows have chunks of
3, 64 and 6 rows, which begin at rows 0, 3 and 67 (boundaries.chunk_table); no chunk holds two
sequences. The kernels:

    steps       of each chunk and head: dt, and the sums of the log decays up to each row
    walk        chunk after chunk with the state in registers; stores the state entering each
    outputs     of each chunk and group: what its rows and the entering state contribute

Backward walks forwards again for the states h that enter the chunks, then backwards for the
gradients g of the leaving ones, and ends with the gradients of the rows. Only inputs are kept. With
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
they would not fit in registers.

Sums of logs are in base 2 and have two parts, high + low, from a sum in float64: then also a small
difference of two large sums has all digits of float32. Inside the kernels states are (N, P).

T rows, S sequences, H heads, P width of a head, G groups of heads, N width of the state; M chunks
of Q rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.boundaries import SSD_ROWS, Bounds, ChunkTable, chunk_table, first_states
from longshore.ops.kernels.launch import power

ROWS = SSD_ROWS
"""Q."""
STEP_HEADS = 32
"""Heads of one program of the kernel `steps`."""
ENOUGH_PROGRAMS = 264
"""With fewer walks than this, two on each of an H200's 132 processors, each is split in two."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""x (T, H, P), dt (T, H), A (H), B and C (T, G, N), and D (H); C: None where only final states are
wanted. D: None for no direct path."""


def steps(dt: Tensor, A: Tensor, layout: ChunkTable) -> tuple[Tensor, Tensor]:
    """(M, H, 3, Q): dt, high, low, and (M, H, 2): the decay of each chunk, as one and rest."""
    count, heads = len(layout.chunks), dt.shape[1]
    steps = torch.empty(count, heads, 3, ROWS, dtype=torch.float32, device=dt.device)
    decay = torch.empty(count, heads, 2, dtype=torch.float32, device=dt.device)
    if count:
        grid = (count, triton.cdiv(heads, STEP_HEADS))
        _steps_kernel[grid](
            dt, A, steps, decay, layout.chunks, heads, *dt.stride(),
            ROWS=ROWS, HEADS=STEP_HEADS, num_warps=4,
        )  # fmt: skip
    return steps, decay


def walk(
    rows: Tensor,
    keys: Tensor,
    steps: tuple[Tensor, Tensor],
    layout: ChunkTable,
    *,
    initial: Tensor | None,
    backwards: bool = False,
    store: bool = True,
    end: bool = True,
    add: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The states entering chunks (M, H, N, P), the last ones (S, H, P, N), and sums of dt (S, H).

    backwards: the gradients of the states that leave the chunks. store, end: whether the first and
    the second result are wanted; add: whether rows add to the state.
    """
    heads, width = rows.shape[1:]
    groups, state = keys.shape[1:]
    sequences, count = len(layout.lengths), len(layout.chunks)
    stored = torch.empty(
        count if store else 0, heads, state, width, dtype=rows.dtype, device=rows.device
    )
    last = torch.empty(
        sequences if end else 0, heads, width, state, dtype=torch.float32, device=rows.device
    )
    spans = torch.empty(sequences, heads, dtype=torch.float32, device=rows.device)
    columns = power(width)
    if sequences * heads < ENOUGH_PROGRAMS and columns > 32:
        columns = columns // 2
    grid = (sequences * heads * triton.cdiv(width, columns),)
    if sequences:
        _walk_kernel[grid](
            rows, keys, *steps, initial, stored, last, spans, layout.sequences, heads,
            *rows.stride()[:2], *keys.stride()[:2],
            RATIO=heads // groups, WIDTH=width, STATE=state,
            ROWS=ROWS, COLUMNS=columns, STATES=power(state),
            BACKWARDS=backwards, INITIAL=initial is not None, STORE=store, END=end, ADD=add,
            num_warps=4 if columns * power(state) <= 64 * 128 else 8,
            num_stages=3 if rows.element_size() == 2 else 1,
        )  # fmt: skip
    return stored, last, spans


def outputs(
    inputs: Inputs, steps: tuple[Tensor, Tensor], entering: Tensor, layout: ChunkTable
) -> Tensor:
    """(T, H, P)."""
    x, _, _, B, C, D = inputs
    assert C is not None
    heads, width = x.shape[1:]
    groups, state = B.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (len(layout.chunks) * groups,)
    if len(layout.chunks):
        _outputs_kernel[grid](
            x, B, C, D, steps[0], entering, y, layout.chunks, heads, groups,
            *x.stride()[:2], *B.stride()[:2], *C.stride()[:2],
            RATIO=heads // groups, WIDTH=width, STATE=state,
            ROWS=ROWS, COLUMNS=power(width), STATES=power(state), SKIP=D is not None,
            num_warps=4 if power(width) <= 64 else 8,
            num_stages=2 if x.element_size() == 2 else 1,
        )  # fmt: skip
    return y


@triton.jit
def _steps_kernel(
    dt_ptr, A_ptr, steps_ptr, decay_ptr, chunks_ptr, heads, dt_row, dt_head,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One chunk and HEADS heads."""
    chunk = tl.program_id(0).to(tl.int64)
    first = tl.load(chunks_ptr + 2 * chunk).to(tl.int64)
    count = tl.load(chunks_ptr + 2 * chunk + 1)
    row = tl.arange(0, ROWS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (row[:, None] < count) & (head[None, :] < heads)
    at = dt_ptr + (first + row)[:, None] * dt_row + head[None, :] * dt_head
    dt = tl.load(at, mask=inside, other=0.0).to(tl.float64)
    A = tl.load(A_ptr + head, mask=head < heads, other=0.0).to(tl.float64)
    logs = dt * A[None, :]
    sums = tl.cumsum(logs * 1.4426950408889634, 0)
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    of_head = chunk * heads + head
    at = steps_ptr + of_head[None, :] * 3 * ROWS + row[:, None]
    kept = (row[:, None] < ROWS) & (head[None, :] < heads)
    tl.store(at, dt.to(tl.float32), mask=kept)
    tl.store(at + ROWS, high, mask=kept)
    tl.store(at + 2 * ROWS, low, mask=kept)
    # one·S + rest·S is the decayed state; ops/boundaries.py says why it is in two parts.
    total = tl.sum(logs, 0)
    one = tl.where(total > -0.5, 1.0, 0.0)
    rest = tl.exp(total) - one
    tl.store(decay_ptr + 2 * of_head, one.to(tl.float32), mask=head < heads)
    tl.store(decay_ptr + 2 * of_head + 1, rest.to(tl.float32), mask=head < heads)


@triton.jit
def _scales(steps_at, row, ROWS: tl.constexpr):
    """dt of each row, the sum of logs up to it in two parts, and the decay from it to the end."""
    dt = tl.load(steps_at + row)
    high = tl.load(steps_at + ROWS + row)
    low = tl.load(steps_at + 2 * ROWS + row)
    last = tl.load(steps_at + 2 * ROWS - 1)
    last_low = tl.load(steps_at + 3 * ROWS - 1)
    return dt, high, low, tl.exp2((last - high) + (last_low - low))


@triton.jit
def _decays(row, high, low):
    """(Q, Q): the decay from row k to row q, 0 for k > q."""
    sums = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp2(tl.where(row[:, None] >= row[None, :], sums, float("-inf")))


@triton.jit
def _chunk(chunks_ptr, groups):
    """The chunk and the group of a program, the first row of the chunk, and its rows."""
    chunk = (tl.program_id(0) // groups).to(tl.int64)
    first = tl.load(chunks_ptr + 2 * chunk).to(tl.int64)
    return chunk, tl.program_id(0) % groups, first, tl.load(chunks_ptr + 2 * chunk + 1)


@triton.jit
def _walk_kernel(
    rows_ptr, keys_ptr, steps_ptr, decay_ptr, initial_ptr, stored_ptr, last_ptr, spans_ptr,
    sequences_ptr, heads, rows_row, rows_head, keys_row, keys_group,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr,
    BACKWARDS: tl.constexpr, INITIAL: tl.constexpr, STORE: tl.constexpr, END: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """One sequence, one head, COLUMNS of its width."""
    blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    head = (program // blocks) % heads
    entry = sequences_ptr + 5 * (program // (blocks * heads))
    sequence = tl.load(entry).to(tl.int64)
    first_chunk = tl.load(entry + 1).to(tl.int64)
    chunks = tl.load(entry + 2)
    first_row = tl.load(entry + 3).to(tl.int64)
    rows = tl.load(entry + 4)

    row = tl.arange(0, ROWS)
    n = tl.arange(0, STATES)
    p = (program % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    real = (n[:, None] < STATE) & (p[None, :] < WIDTH)
    rows_at = rows_ptr + first_row * rows_row + head * rows_head + p[None, :]
    keys_at = keys_ptr + first_row * keys_row + (head // RATIO) * keys_group + n[None, :]
    ends_at = (sequence * heads + head) * WIDTH * STATE + p[None, :] * STATE + n[:, None]
    state = tl.zeros((STATES, COLUMNS), tl.float32)
    if INITIAL:
        state = tl.load(initial_ptr + ends_at, mask=real, other=0.0)
    span = 0.0
    for step in range(chunks):
        number = chunks - 1 - step if BACKWARDS else step
        of_head = (first_chunk + number) * heads + head
        if STORE:
            at = stored_ptr + of_head * WIDTH * STATE + n[:, None] * WIDTH + p[None, :]
            tl.store(at, state.to(stored_ptr.dtype.element_ty), mask=real)
        one = tl.load(decay_ptr + 2 * of_head)
        rest = tl.load(decay_ptr + 2 * of_head + 1)
        added = rest * state
        if ADD:
            steps_at = steps_ptr + of_head * 3 * ROWS
            if BACKWARDS:
                weight = tl.exp2(tl.load(steps_at + ROWS + row))
            else:
                dt, _, _, to_end = _scales(steps_at, row, ROWS)
                weight = dt * to_end
                span += tl.sum(dt, 0)
            t = (number * ROWS + row)[:, None]
            of_rows, of_keys = (t < rows) & (p[None, :] < WIDTH), (t < rows) & (n[None, :] < STATE)
            values = tl.load(rows_at + t.to(tl.int64) * rows_row, mask=of_rows, other=0.0)
            keys = tl.load(keys_at + t.to(tl.int64) * keys_row, mask=of_keys, other=0.0)
            values = (values.to(tl.float32) * weight[:, None]).to(values.dtype)
            added = tl.dot(tl.trans(keys), values, acc=added, input_precision="ieee")
        state = one * state + added
    if END:
        tl.store(last_ptr + ends_at, state, mask=real)
    if program % blocks == 0:
        tl.store(spans_ptr + sequence * heads + head, span)


@triton.jit
def _outputs_kernel(
    x_ptr, B_ptr, C_ptr, D_ptr, steps_ptr, entering_ptr, y_ptr, chunks_ptr, heads, groups,
    x_row, x_head, B_row, B_group, C_row, C_group,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """One chunk, one group: its heads one after another."""
    chunk, group, first, count = _chunk(chunks_ptr, groups)
    row, n, p = tl.arange(0, ROWS), tl.arange(0, STATES), tl.arange(0, COLUMNS)
    t = (first + row)[:, None]
    of_keys = (row[:, None] < count) & (n[None, :] < STATE)
    of_rows = (row[:, None] < count) & (p[None, :] < WIDTH)
    of_state = (n[:, None] < STATE) & (p[None, :] < WIDTH)
    B = tl.load(B_ptr + t * B_row + group * B_group + n[None, :], mask=of_keys, other=0.0)
    C = tl.load(C_ptr + t * C_row + group * C_group + n[None, :], mask=of_keys, other=0.0)
    scores = tl.dot(C, tl.trans(B), input_precision="ieee")
    for each in range(RATIO):
        head = group * RATIO + each
        of_head = chunk * heads + head
        x = tl.load(x_ptr + t * x_row + head * x_head + p[None, :], mask=of_rows, other=0.0)
        at = entering_ptr + of_head * WIDTH * STATE + n[:, None] * WIDTH + p[None, :]
        state = tl.load(at, mask=of_state, other=0.0)
        steps_at = steps_ptr + of_head * 3 * ROWS + row
        dt = tl.load(steps_at)
        high = tl.load(steps_at + ROWS)
        low = tl.load(steps_at + 2 * ROWS)
        shares = (scores * _decays(row, high, low) * dt[None, :]).to(x.dtype)
        y = tl.dot(C, state, input_precision="ieee") * tl.exp2(high)[:, None]
        y = tl.dot(shares, x, acc=y, input_precision="ieee")
        if SKIP:
            y += tl.load(D_ptr + head).to(tl.float32) * x.to(tl.float32)
        at = y_ptr + (t * heads + head) * WIDTH + p[None, :]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=of_rows)


def row_gradients(
    inputs: Inputs,
    dy: Tensor | None,
    steps: tuple[Tensor, Tensor],
    layout: ChunkTable,
    *,
    entering: Tensor,
    leaving: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs; dy: None where only final states are used."""
    x, dt, A, B, C, D = inputs
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


@triton.jit
def _within(scores, faded, dt, u, v, w, before, row, x, dy, dx):
    """X; and of a chunk's rows dx, ddt without A·da, and da without e_Q (g·h)."""
    X = tl.dot(dy, tl.trans(x), input_precision="ieee")
    terms = X * scores * faded
    ddt = tl.sum(terms, 0) + v
    terms = tl.where(row[:, None] > row[None, :], terms * dt[None, :], 0.0)
    terms = tl.dot(terms.to(x.dtype), before, input_precision="ieee")
    da = tl.sum(tl.where(row[:, None] >= row[None, :], terms + u[:, None], w), 0)
    shares = (scores * (faded * dt[None, :])).to(x.dtype)
    dx = tl.dot(tl.trans(shares), dy, acc=dx, input_precision="ieee")
    return X, dx, ddt, da


@triton.jit(do_not_specialize=["count"])
def _gradients_kernel(
    x_ptr, dy_ptr, A_ptr, B_ptr, C_ptr, D_ptr, steps_ptr, decay_ptr, entering_ptr, leaving_ptr,
    dx_ptr, ddt_ptr, d_scores_ptr, sums_ptr, chunks_ptr, heads, groups, count,
    x_row, x_head, dy_row, dy_head, B_row, B_group, C_row, C_group,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STATES: tl.constexpr, SKIP: tl.constexpr, DY: tl.constexpr,
):  # fmt: skip
    """One chunk, one group: its heads one after another."""
    chunk, group, first, rows = _chunk(chunks_ptr, groups)
    row, n, p = tl.arange(0, ROWS), tl.arange(0, STATES), tl.arange(0, COLUMNS)
    t = (first + row)[:, None]
    of_keys = (row[:, None] < rows) & (n[None, :] < STATE)
    of_rows = (row[:, None] < rows) & (p[None, :] < WIDTH)
    # A chunk of 0 rows fills a table: no state enters or leaves it.
    of_state = (n[:, None] < STATE) & (p[None, :] < WIDTH) & (rows > 0)
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
        dt, high, low, to_end = _scales(steps_at, row, ROWS)
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
            faded = _decays(row, high, low)
            X, dx, ddt, da = _within(scores, faded, dt, u, v, w, before, row, x, dy, dx)
            d_scores += X * (faded * dt[None, :])
            dD = tl.sum(tl.sum(tl.where(row[:, None] == row[None, :], X, 0.0), 1), 0)
            tl.store(sums_ptr + (count + chunk) * heads + head, dD)
            if SKIP:
                dx += tl.load(D_ptr + head).to(tl.float32) * dy.to(tl.float32)
        else:
            da, ddt = tl.sum(tl.where(row[:, None] >= row[None, :], 0.0, w), 0), v
        da += kept
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
    RATIO: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STATES: tl.constexpr, OF_C: tl.constexpr, DY: tl.constexpr,
):  # fmt: skip
    """One chunk, one group: dC from dy, h and B, or dB from x, g and C."""
    chunk, group, first, count = _chunk(chunks_ptr, groups)
    row, n, p = tl.arange(0, ROWS), tl.arange(0, STATES), tl.arange(0, COLUMNS)
    t = (first + row)[:, None]
    of_keys = (row[:, None] < count) & (n[None, :] < STATE)
    of_rows = (row[:, None] < count) & (p[None, :] < WIDTH)
    of_state = (n[:, None] < STATE) & (p[None, :] < WIDTH)
    total = tl.zeros((ROWS, STATES), tl.float32)
    for each in range(RATIO):
        head = group * RATIO + each
        of_head = chunk * heads + head
        steps_at = steps_ptr + of_head * 3 * ROWS
        if OF_C:
            weight = tl.exp2(tl.load(steps_at + ROWS + row))
        else:
            dt, _, _, to_end = _scales(steps_at, row, ROWS)
            weight = dt * to_end
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


@dataclass(frozen=True, slots=True, eq=False)
class KernelSSD:
    """The scan of these rows; initial states come later, as in ops/ssd.py."""

    inputs: Inputs
    layout: ChunkTable

    def ends(self) -> tuple[Tensor, Tensor]:
        """The transition (S, H) and the final state from 0 (S, H, P, N) of each sequence."""
        x, dt, A, B, _, _ = self.inputs
        spans, final = _Ends.apply(x, dt, A, B, self.layout)
        return (A.float() * spans).exp(), final

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, P) and final states (S, H, P, N)."""
        x, _, _, B, _, _ = self.inputs
        if initial is not None:
            shape = (len(self.layout.lengths), *x.shape[1:], B.shape[2])
            initial = first_states(initial, shape, like=x).contiguous()
        return _Scan.apply(initial, self.layout, *self.inputs)


def prepare(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bounds: Bounds | None
) -> KernelSSD:
    layout = chunk_table(bounds, len(x), x.device)
    B, C = (_by_columns(part.to(x.dtype)) for part in (B, C))
    A, D = A.contiguous(), None if D is None else D.contiguous()
    return KernelSSD((_by_columns(x), dt, A, B, C, D), layout)


def _by_columns(rows: Tensor) -> Tensor:
    """With a contiguous last dim."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _Scan(torch.autograd.Function):
    """Outputs and final states."""

    @staticmethod
    def forward(
        ctx: Any, initial: Tensor | None, layout: ChunkTable, *inputs: Any
    ) -> tuple[Tensor, Tensor]:
        x, dt, A, B, _, _ = inputs
        scales = steps(dt, A, layout)
        entering, final, _ = walk(x, B, scales, layout, initial=initial)
        y = outputs(inputs, scales, entering, layout)
        ctx.save_for_backward(initial, *inputs)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        initial, *inputs = ctx.saved_tensors
        dinitial, *grads = _gradients(tuple(inputs), initial, ctx.layout, dy=dy, dfinal=dfinal)
        return dinitial, None, *grads


class _Ends(torch.autograd.Function):
    """The sums of dt (S, H), and final states from 0."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, layout: ChunkTable
    ) -> tuple[Tensor, Tensor]:
        _, final, spans = walk(x, B, steps(dt, A, layout), layout, initial=None, store=False)
        ctx.save_for_backward(x, dt, A, B)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return spans, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dspans: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        x, dt, A, B = ctx.saved_tensors
        inputs = x, dt, A, B, None, None
        _, dx, ddt, dA, dB, *_ = _gradients(inputs, None, ctx.layout, dy=None, dfinal=dfinal)
        if dspans is not None:
            each = dspans.repeat_interleave(ctx.layout.lengths, dim=0, output_size=len(dt))
            ddt = each.to(dt.dtype) if ddt is None else ddt + each
        return dx, ddt, dA, dB, None


def _gradients(
    inputs: Inputs,
    initial: Tensor | None,
    layout: ChunkTable,
    *,
    dy: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the initial states, and of the inputs."""
    x, dt, A, B, C, _ = inputs
    if dy is None and dfinal is None:
        return (None,) * 7
    if dy is not None:
        dy = _by_columns(dy)
    scales = steps(dt, A, layout)
    entering, _, _ = walk(x, B, scales, layout, initial=initial, end=False)
    # Without dy, the rows and C only give shapes and strides.
    leaving, dinitial, _ = walk(
        x if dy is None else dy,
        B if C is None else C,
        scales,
        layout,
        initial=None if dfinal is None else dfinal.contiguous(),
        backwards=True,
        end=initial is not None,
        add=dy is not None,
    )
    grads = row_gradients(inputs, dy, scales, layout, entering=entering, leaving=leaving)
    return None if initial is None else dinitial, *grads
