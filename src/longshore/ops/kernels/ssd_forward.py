"""The forward kernels of ops/kernels/ssd.py: steps, walk and outputs.

In: rows with their strides, and a table of chunks (ops/tables.py). Out: what each kernel's function
says. Sequences of 3 and 70 rows have the chunks (first row, rows) (0, 3), (3, 64), (67, 6).

Letters as in ops/kernels/ssd.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.ops.tables import SSD_ROWS, ChunkTable

ROWS = SSD_ROWS
"""Q."""
STEP_HEADS = 32
"""Heads of one program of the kernel `steps`."""
ENOUGH_PROGRAMS = 264
"""With fewer walks than this, two on each of an H200's 132 processors, each is split in two."""


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
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    steps: tuple[Tensor, Tensor],
    entering: Tensor,
    layout: ChunkTable,
) -> Tensor:
    """(T, H, P)."""
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


def power(width: int) -> int:
    """The power of 2 that holds this width; products want 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


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
        number = step
        if BACKWARDS:
            number = chunks - 1 - step
        of_head = (first_chunk + number) * heads + head
        if STORE:
            at = stored_ptr + of_head * WIDTH * STATE + n[:, None] * WIDTH + p[None, :]
            tl.store(at, state.to(stored_ptr.dtype.element_ty), mask=real)
        one = tl.load(decay_ptr + 2 * of_head)
        rest = tl.load(decay_ptr + 2 * of_head + 1)
        added = rest * state
        if ADD:
            steps_at = steps_ptr + of_head * 3 * ROWS
            high = tl.load(steps_at + ROWS + row)
            if BACKWARDS:
                weight = tl.exp2(high)
            else:
                dt = tl.load(steps_at + row)
                low = tl.load(steps_at + 2 * ROWS + row)
                last = tl.load(steps_at + 2 * ROWS - 1)
                last_low = tl.load(steps_at + 3 * ROWS - 1)
                weight = dt * tl.exp2((last - high) + (last_low - low))
                span += tl.sum(dt, 0)
            t = number * ROWS + row
            values = tl.load(
                rows_at + t[:, None].to(tl.int64) * rows_row,
                mask=(t[:, None] < rows) & (p[None, :] < WIDTH), other=0.0,
            )  # fmt: skip
            keys = tl.load(
                keys_at + t[:, None].to(tl.int64) * keys_row,
                mask=(t[:, None] < rows) & (n[None, :] < STATE), other=0.0,
            )  # fmt: skip
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
        sums = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        sums = tl.where(row[:, None] >= row[None, :], sums, float("-inf"))
        shares = (scores * tl.exp2(sums) * dt[None, :]).to(x.dtype)
        y = tl.dot(C, state, input_precision="ieee") * tl.exp2(high)[:, None]
        y = tl.dot(shares, x, acc=y, input_precision="ieee")
        if SKIP:
            y += tl.load(D_ptr + head).to(tl.float32) * x.to(tl.float32)
        at = y_ptr + (t * heads + head) * WIDTH + p[None, :]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=of_rows)
