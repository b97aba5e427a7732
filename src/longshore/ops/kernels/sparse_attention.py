"""Attention over a window and compressed entries, as Triton kernels.

In and out: as ops/sparse_attention.py. A program has one query token and some of its heads: all
heads read the same keys, which are the values too, so the heads are the rows of its products. Keys
come in blocks, first the window's rows, then entries: one after another, or those that were chosen.

    forward     scores, a running maximum and sum, the output; keeps the log-sum-exp of each head
    mass        the probabilities of chosen entries once more, summed over the heads
    backward    from log-sum-exps: the queries' gradients, and the keys' by atomic additions, in
                float32; so their last bits differ from run to run

A width of 512 is two parts of 256, so that products fit in registers; a smaller one is one part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.ops.kernels.launch import Kernel, power
from longshore.ops.sparse_attention import RowRanges

HEADS, BACKWARD_HEADS = 64, 32
"""Heads of a program, at most: with a width of 512 more do not fit into shared memory."""
KEYS = 32
"""Keys of a block."""
PART = 256
"""Columns of a part of a head's width, at most."""


def forward(
    q: Tensor,
    sinks: Tensor,
    near: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    ranges: RowRanges,
    *,
    scale: float,
    needs_mass: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output (T, H, D), log-sum-exp (T, H), and the mass of chosen entries (T, K)."""
    rows, heads, _ = q.shape
    q, near, entries = q.contiguous(), near.contiguous(), entries.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    sizes = _sizes(q, chosen)
    grid = (rows, triton.cdiv(heads, sizes["HEADS"]))
    arguments = _arguments(ranges, chosen)
    if rows:
        _forward_kernel[grid](
            q, near, entries, sinks.float(), *arguments, out, lse, heads, scale,
            num_warps=8, num_stages=1, **sizes,
        )  # fmt: skip
    if chosen is None or not needs_mass:
        return out, lse, None
    mass = torch.zeros(chosen.shape, dtype=torch.float32, device=q.device)
    if mass.numel():
        _mass_kernel[(rows,)](
            q, entries, chosen, lse, mass, heads, chosen.shape[1], scale,
            num_warps=8, num_stages=1, **sizes,
        )  # fmt: skip
    return out, lse, mass


def backward(
    grad: Tensor,
    q: Tensor,
    sinks: Tensor,
    near: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    ranges: RowRanges,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, near, entries and sinks."""
    rows, heads, _ = q.shape
    grad, q, near, entries = (x.contiguous() for x in (grad, q, near, entries))
    # What a head's scores have in common: the output's part of their gradients.
    delta = (grad.float() * out.float()).sum(-1)
    dq = torch.empty_like(q)
    dnear = torch.zeros(near.shape, dtype=torch.float32, device=q.device)
    dentries = torch.zeros(entries.shape, dtype=torch.float32, device=q.device)
    sizes = _sizes(q, chosen, most_heads=BACKWARD_HEADS)
    if rows:
        _backward_kernel[(rows, triton.cdiv(heads, sizes["HEADS"]))](
            q, near, entries, *_arguments(ranges, chosen), grad, lse, delta, dq, dnear, dentries,
            heads, scale, num_warps=8, num_stages=1, **sizes,
        )  # fmt: skip
    dsinks = -((sinks.float() - lse).exp() * delta).sum(0)
    return dq, dnear.to(near.dtype), dentries.to(entries.dtype), dsinks.to(sinks.dtype)


def _arguments(ranges: RowRanges, chosen: Tensor | None) -> tuple[Tensor | int, ...]:
    """What each query sees; without chosen entries the last tensor is not read."""
    table = ranges.near_first if chosen is None else chosen
    count = 0 if chosen is None else chosen.shape[1]
    near, entries = (ranges.near_first, ranges.near_stop), (ranges.entry_first, ranges.entry_count)
    return *near, *entries, table, count


def _sizes(q: Tensor, chosen: Tensor | None, *, most_heads: int = HEADS) -> dict[str, int]:
    heads, width = q.shape[1:]
    whole = power(width)
    return {
        "WIDTH": width,
        "PART": min(whole, PART),
        "PARTS": max(1, whole // PART),
        "HEADS": min(most_heads, power(heads)),
        "KEYS": KEYS,
        "CHOSEN": int(chosen is not None),
    }


@triton.jit
def _tile(ptr, rows, here, part, WIDTH: tl.constexpr, PART: tl.constexpr):
    """(rows, PART) of a matrix of WIDTH columns; 0 where a row is not here."""
    column = part * PART + tl.arange(0, PART)
    mask = here[:, None] & (column[None, :] < WIDTH)
    at = ptr + rows[:, None].to(tl.int64) * WIDTH + column[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _key_rows(block, entry_first, entries, chosen_ptr, KEYS: tl.constexpr, CHOSEN: tl.constexpr):
    """The rows of a block of entries, and which of them are there."""
    place = block * KEYS + tl.arange(0, KEYS)
    here = place < entries
    row = entry_first + place
    if CHOSEN:
        row = tl.load(chosen_ptr + place, mask=here, other=-1)
        here = here & (row >= 0)
    return tl.where(here, row, 0), here


@triton.jit
def _attend(
    keys_ptr, rows, here, q0, q1, out0, out1, top, total, scale,
    WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One block of keys: the running output, maximum and sum."""
    k0 = _tile(keys_ptr, rows, here, 0, WIDTH, PART)
    scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    k1 = k0
    if PARTS == 2:
        k1 = _tile(keys_ptr, rows, here, 1, WIDTH, PART)
        scores = tl.dot(q1, tl.trans(k1), acc=scores, input_precision="ieee")
    scores = tl.where(here[None, :], scores * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp(top - higher)
    weights = tl.exp(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, 1)
    small = weights.to(k0.dtype)
    out0 = tl.dot(small, k0, acc=out0 * shrink[:, None], input_precision="ieee")
    if PARTS == 2:
        out1 = tl.dot(small, k1, acc=out1 * shrink[:, None], input_precision="ieee")
    return out0, out1, higher, total


@triton.jit
def _forward_jit(
    q_ptr, near_ptr, entries_ptr, sinks_ptr,
    first_ptr, stop_ptr, entry_ptr, count_ptr, chosen_ptr, chosen_count,
    out_ptr, lse_ptr, heads, scale,
    WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """One token, HEADS of its heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    rows = token * heads + head
    q0 = _tile(q_ptr, rows, real, 0, WIDTH, PART)
    q1 = q0
    out0 = tl.zeros((HEADS, PART), tl.float32)
    out1 = out0
    if PARTS == 2:
        q1 = _tile(q_ptr, rows, real, 1, WIDTH, PART)
    # The sink is a key whose value is 0.
    top = tl.load(sinks_ptr + head, mask=real, other=0.0)
    total = tl.full((HEADS,), 1.0, tl.float32)
    first, stop = tl.load(first_ptr + token), tl.load(stop_ptr + token)
    for start in range(first, stop, KEYS):
        place = start + tl.arange(0, KEYS)
        out0, out1, top, total = _attend(
            near_ptr, place, place < stop, q0, q1, out0, out1, top, total, scale,
            WIDTH, PART, PARTS,
        )  # fmt: skip
    entry, entries = tl.load(entry_ptr + token), tl.load(count_ptr + token)
    if CHOSEN:
        entries = tl.minimum(entries, chosen_count)
    for block in range(tl.cdiv(entries, KEYS)):
        place, here = _key_rows(
            block, entry, entries, chosen_ptr + token * chosen_count, KEYS, CHOSEN
        )
        out0, out1, top, total = _attend(
            entries_ptr, place, here, q0, q1, out0, out1, top, total, scale, WIDTH, PART, PARTS
        )
    column = tl.arange(0, PART)
    at = out_ptr + rows[:, None] * WIDTH + column[None, :]
    kept = real[:, None] & (column[None, :] < WIDTH)
    tl.store(at, (out0 / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept)
    if PARTS == 2:
        kept = real[:, None] & (PART + column[None, :] < WIDTH)
        tl.store(at + PART, (out1 / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept)
    tl.store(lse_ptr + rows, top + tl.log(total), mask=real)


@triton.jit
def _mass_jit(
    q_ptr, entries_ptr, chosen_ptr, lse_ptr, mass_ptr, heads, chosen_count, scale,
    WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """One token, all heads."""
    token = tl.program_id(0).to(tl.int64)
    for block in range(tl.cdiv(chosen_count, KEYS)):
        place = block * KEYS + tl.arange(0, KEYS)
        row = tl.load(
            chosen_ptr + token * chosen_count + place, mask=place < chosen_count, other=-1
        )
        here = row >= 0
        row = tl.where(here, row, 0)
        sums = tl.zeros((KEYS,), tl.float32)
        for group in range(tl.cdiv(heads, HEADS)):
            head = group * HEADS + tl.arange(0, HEADS)
            real = head < heads
            rows = token * heads + head
            q0 = _tile(q_ptr, rows, real, 0, WIDTH, PART)
            k0 = _tile(entries_ptr, row, here, 0, WIDTH, PART)
            scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
            if PARTS == 2:
                q1 = _tile(q_ptr, rows, real, 1, WIDTH, PART)
                k1 = _tile(entries_ptr, row, here, 1, WIDTH, PART)
                scores = tl.dot(q1, tl.trans(k1), acc=scores, input_precision="ieee")
            lse = tl.load(lse_ptr + rows, mask=real, other=float("inf"))
            sums += tl.sum(tl.exp(scores * scale - lse[:, None]), 0)
        at = mass_ptr + token * chosen_count + place
        tl.store(at, tl.where(here, sums, 0.0), mask=place < chosen_count)


@triton.jit
def _give(
    keys_ptr, dkeys_ptr, rows, here, q0, q1, g0, g1, dq0, dq1, lse, delta, scale,
    WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One block of keys: their gradients, and what they add to the queries'."""
    k0 = _tile(keys_ptr, rows, here, 0, WIDTH, PART)
    scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    dweights = tl.dot(g0, tl.trans(k0), input_precision="ieee")
    k1 = k0
    if PARTS == 2:
        k1 = _tile(keys_ptr, rows, here, 1, WIDTH, PART)
        scores = tl.dot(q1, tl.trans(k1), acc=scores, input_precision="ieee")
        dweights = tl.dot(g1, tl.trans(k1), acc=dweights, input_precision="ieee")
    weights = tl.where(here[None, :], tl.exp(scores * scale - lse[:, None]), 0.0)
    dscores = (weights * (dweights - delta[:, None]) * scale).to(k0.dtype)
    small = weights.to(k0.dtype)
    dq0 = tl.dot(dscores, k0, acc=dq0, input_precision="ieee")
    column = tl.arange(0, PART)
    at = dkeys_ptr + rows[:, None].to(tl.int64) * WIDTH + column[None, :]
    dk0 = tl.dot(tl.trans(dscores), q0, input_precision="ieee")
    dk0 = tl.dot(tl.trans(small), g0, acc=dk0, input_precision="ieee")
    tl.atomic_add(at, dk0, mask=here[:, None] & (column[None, :] < WIDTH), sem="relaxed")
    if PARTS == 2:
        dq1 = tl.dot(dscores, k1, acc=dq1, input_precision="ieee")
        dk1 = tl.dot(tl.trans(dscores), q1, input_precision="ieee")
        dk1 = tl.dot(tl.trans(small), g1, acc=dk1, input_precision="ieee")
        kept = here[:, None] & (PART + column[None, :] < WIDTH)
        tl.atomic_add(at + PART, dk1, mask=kept, sem="relaxed")
    return dq0, dq1


@triton.jit
def _backward_jit(
    q_ptr, near_ptr, entries_ptr,
    first_ptr, stop_ptr, entry_ptr, count_ptr, chosen_ptr, chosen_count,
    grad_ptr, lse_ptr, delta_ptr, dq_ptr, dnear_ptr, dentries_ptr, heads, scale,
    WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """One token, HEADS of its heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    rows = token * heads + head
    q0 = _tile(q_ptr, rows, real, 0, WIDTH, PART)
    g0 = _tile(grad_ptr, rows, real, 0, WIDTH, PART)
    q1, g1 = q0, g0
    if PARTS == 2:
        q1 = _tile(q_ptr, rows, real, 1, WIDTH, PART)
        g1 = _tile(grad_ptr, rows, real, 1, WIDTH, PART)
    dq0 = tl.zeros((HEADS, PART), tl.float32)
    dq1 = dq0
    lse = tl.load(lse_ptr + rows, mask=real, other=float("inf"))
    delta = tl.load(delta_ptr + rows, mask=real, other=0.0)
    first, stop = tl.load(first_ptr + token), tl.load(stop_ptr + token)
    for start in range(first, stop, KEYS):
        place = start + tl.arange(0, KEYS)
        dq0, dq1 = _give(
            near_ptr, dnear_ptr, place, place < stop, q0, q1, g0, g1, dq0, dq1, lse, delta, scale,
            WIDTH, PART, PARTS,
        )  # fmt: skip
    entry, entries = tl.load(entry_ptr + token), tl.load(count_ptr + token)
    if CHOSEN:
        entries = tl.minimum(entries, chosen_count)
    for block in range(tl.cdiv(entries, KEYS)):
        place, here = _key_rows(
            block, entry, entries, chosen_ptr + token * chosen_count, KEYS, CHOSEN
        )
        dq0, dq1 = _give(
            entries_ptr, dentries_ptr, place, here, q0, q1, g0, g1, dq0, dq1, lse, delta, scale,
            WIDTH, PART, PARTS,
        )  # fmt: skip
    column = tl.arange(0, PART)
    at = dq_ptr + rows[:, None] * WIDTH + column[None, :]
    tl.store(at, dq0.to(dq_ptr.dtype.element_ty), mask=real[:, None] & (column[None, :] < WIDTH))
    if PARTS == 2:
        kept = real[:, None] & (PART + column[None, :] < WIDTH)
        tl.store(at + PART, dq1.to(dq_ptr.dtype.element_ty), mask=kept)


_forward_kernel, _mass_kernel, _backward_kernel = map(
    Kernel, (_forward_jit, _mass_jit, _backward_jit)
)
