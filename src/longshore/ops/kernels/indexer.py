"""Scores of the indexer as Triton kernels: of a block of entries, or of chosen ones.

In and out: as in ops/indexer.py. A program has one query token with all its heads, in groups of up
to 64, and blocks of keys: the products of heads and keys stay in registers, and only their weighted
sums over the heads are written.

    scores              (n, e) of all queries and entries of a block
    chosen_scores       (T, K) of each query's own entries, −∞ where there is none
    chosen_gradients    from the gradients of those: of queries, weights and keys; the keys' by
                        atomic additions in float32
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.ops.kernels.launch import Kernel, power

HEADS = 64
"""Heads of a group, at most."""
KEYS = 64
"""Keys of a block."""


def scores(q_nHD: Tensor, weights_nH: Tensor, keys_eD: Tensor) -> Tensor:
    """(n, e) in float32."""
    rows, heads, _ = q_nHD.shape
    result = torch.empty(rows, len(keys_eD), dtype=torch.float32, device=q_nHD.device)
    if result.numel():
        _scores_kernel[(rows, triton.cdiv(len(keys_eD), KEYS))](
            q_nHD.contiguous(), weights_nH.contiguous(), keys_eD.contiguous(), result,
            heads, len(keys_eD), num_warps=4, num_stages=1, **_sizes(q_nHD),
        )  # fmt: skip
    return result


def chosen_scores(q_THD: Tensor, weights_TH: Tensor, keys_ED: Tensor, chosen_TK: Tensor) -> Tensor:
    """(T, K) in float32."""
    rows, heads, _ = q_THD.shape
    result = torch.empty(chosen_TK.shape, dtype=torch.float32, device=q_THD.device)
    if result.numel():
        _chosen_kernel[(rows, triton.cdiv(chosen_TK.shape[1], KEYS))](
            q_THD.contiguous(), weights_TH.contiguous(), keys_ED.contiguous(), chosen_TK, result,
            heads, chosen_TK.shape[1], num_warps=4, num_stages=1, **_sizes(q_THD),
        )  # fmt: skip
    return result


def chosen_gradients(
    grad_TK: Tensor, q_THD: Tensor, weights_TH: Tensor, keys_ED: Tensor, chosen_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, weights and keys; grad: 0 where no entry is chosen."""
    rows, heads, _ = q_THD.shape
    dq, dweights = torch.zeros_like(q_THD), torch.zeros_like(weights_TH)
    dkeys = torch.zeros(keys_ED.shape, dtype=torch.float32, device=q_THD.device)
    if chosen_TK.numel():
        sizes = _sizes(q_THD)
        _gradients_kernel[(rows, triton.cdiv(heads, sizes["HEADS"]))](
            grad_TK.contiguous(), q_THD.contiguous(), weights_TH.contiguous(),
            keys_ED.contiguous(), chosen_TK, dq, dweights, dkeys, heads, chosen_TK.shape[1],
            num_warps=4, num_stages=1, **sizes,
        )  # fmt: skip
    return dq, dweights, dkeys.to(keys_ED.dtype)


def _sizes(q: Tensor) -> dict[str, int]:
    heads, width = q.shape[1:]
    groups = min(HEADS, power(heads))
    return {"WIDTH": width, "COLUMNS": power(width), "HEADS": groups, "KEYS": KEYS}


@triton.jit
def _rows(ptr, rows, here, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows, COLUMNS) of a matrix of WIDTH columns; 0 where a row is not here."""
    column = tl.arange(0, COLUMNS)
    mask = here[:, None] & (column[None, :] < WIDTH)
    return tl.load(ptr + rows[:, None].to(tl.int64) * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def _summed(
    q_ptr, weights_ptr, token, keys, heads,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Σ over heads of weight · relu(query · key), for a block of keys."""
    sums = tl.zeros((KEYS,), tl.float32)
    for group in range(tl.cdiv(heads, HEADS)):
        head = group * HEADS + tl.arange(0, HEADS)
        real = head < heads
        q = _rows(q_ptr, token * heads + head, real, WIDTH, COLUMNS)
        weight = tl.load(weights_ptr + token * heads + head, mask=real, other=0.0).to(tl.float32)
        products = tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
        sums += tl.sum(products * weight[:, None], 0)
    return sums


@triton.jit
def _scores_jit(
    q_ptr, weights_ptr, keys_ptr, out_ptr, heads, entries,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    here = place < entries
    keys = _rows(keys_ptr, place, here, WIDTH, COLUMNS)
    sums = _summed(q_ptr, weights_ptr, token, keys, heads, WIDTH, COLUMNS, HEADS, KEYS)
    tl.store(out_ptr + token * entries + place, sums, mask=here)


@triton.jit
def _chosen_jit(
    q_ptr, weights_ptr, keys_ptr, chosen_ptr, out_ptr, heads, count,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    inside = place < count
    row = tl.load(chosen_ptr + token * count + place, mask=inside, other=-1)
    here = row >= 0
    keys = _rows(keys_ptr, tl.where(here, row, 0), here, WIDTH, COLUMNS)
    sums = _summed(q_ptr, weights_ptr, token, keys, heads, WIDTH, COLUMNS, HEADS, KEYS)
    tl.store(out_ptr + token * count + place, tl.where(here, sums, float("-inf")), mask=inside)


@triton.jit
def _gradients_jit(
    grad_ptr, q_ptr, weights_ptr, keys_ptr, chosen_ptr, dq_ptr, dweights_ptr, dkeys_ptr,
    heads, count,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One token, a group of its heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    rows = token * heads + head
    q = _rows(q_ptr, rows, real, WIDTH, COLUMNS)
    weight = tl.load(weights_ptr + rows, mask=real, other=0.0).to(tl.float32)
    dq = tl.zeros((HEADS, COLUMNS), tl.float32)
    dweight = tl.zeros((HEADS,), tl.float32)
    column = tl.arange(0, COLUMNS)
    for block in range(tl.cdiv(count, KEYS)):
        place = block * KEYS + tl.arange(0, KEYS)
        inside = place < count
        row = tl.load(chosen_ptr + token * count + place, mask=inside, other=-1)
        here = row >= 0
        row = tl.where(here, row, 0)
        keys = _rows(keys_ptr, row, here, WIDTH, COLUMNS)
        grad = tl.load(grad_ptr + token * count + place, mask=inside & here, other=0.0)
        products = tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
        dweight += tl.sum(products * grad[None, :], 1)
        dproducts = tl.where(products > 0, weight[:, None] * grad[None, :], 0.0).to(q.dtype)
        dq = tl.dot(dproducts, keys, acc=dq, input_precision="ieee")
        dkeys = tl.dot(tl.trans(dproducts), q, input_precision="ieee")
        at = dkeys_ptr + row[:, None].to(tl.int64) * WIDTH + column[None, :]
        tl.atomic_add(at, dkeys, mask=here[:, None] & (column[None, :] < WIDTH), sem="relaxed")
    at = dq_ptr + rows[:, None] * WIDTH + column[None, :]
    tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=real[:, None] & (column[None, :] < WIDTH))
    tl.store(dweights_ptr + rows, dweight.to(dweights_ptr.dtype.element_ty), mask=real)


_scores_kernel, _chosen_kernel, _gradients_kernel = map(
    Kernel, (_scores_jit, _chosen_jit, _gradients_jit)
)
