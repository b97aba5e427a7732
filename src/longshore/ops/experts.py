"""Experts: dispatches rows to the experts they are routed to, applies SwiGLU, and combines them.

In: rows and the experts of each. Out: rows, weighted and summed. The router is in
model/feed_forward.py.

T tokens, K experts a token, M = T·K rows, E experts, C channels, F channels inside an expert. Two
tokens, 3 experts, ids [[2, 0], [0, 1]]:

    rows by token, then k    t0→2  t0→0  t1→0  t1→1
    order    1 2 3 0         rows by expert: t0→0  t1→0  t1→1  t0→2
    counts   2 1 1           offsets  2 3 4, the stop of each expert's rows

An id of E or more means no expert: its row is past the last offset and its output is 0. Only the
per-expert loop waits for the device; no result depends on the order in which threads add.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu

from longshore.ops.backends import grouped_refusal, pick
from longshore.ops.pointwise import clipped

MOST_INT16 = torch.iinfo(torch.int16).max


def expert_mlp(
    x_TC: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    gate_up_E2FC: Tensor,
    down_ECF: Tensor,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(T, C): each token through its experts, weighted and summed; and int32 (E) rows of each.

    limit: gate and up are clipped to it; 0: they are not.
    """
    order, counts_E, offsets_E = sort_by_expert(ids_TK, len(down_ECF))
    backend: Any = pick("experts", x_TC, gate_up_E2FC, down_ECF)
    mlp = sorted_mlp if backend is None else backend.sorted_mlp
    weights = {"gate_up_E2FC": gate_up_E2FC, "down_ECF": down_ECF}
    return mlp(x_TC, weights_TK, order, offsets_E, **weights, limit=limit), counts_E


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
    """(T, C), in plain torch: dispatch, each expert's SwiGLU, combine."""
    weights: dict[str, Any] = {"gate_up_E2FC": gate_up_E2FC, "down_ECF": down_ECF}
    rows_MC = grouped_mlp(dispatch(x_TC, order), offsets_E, **weights, limit=limit)
    return combine(rows_MC, order, weights_TK)


def sort_by_expert(expert_ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order: int64 (M), row m by expert is row order[m] by token. counts, offsets: int32 (E)."""
    # A radix sort takes a pass for each byte or so of a key; ids past the experts may be anything.
    if experts < MOST_INT16:
        expert_ids_TK = expert_ids_TK.clamp(max=MOST_INT16).to(torch.int16)
    ids_M, order = expert_ids_TK.flatten().sort(stable=True)
    numbers = torch.arange(experts, dtype=ids_M.dtype, device=ids_M.device)
    offsets = torch.searchsorted(ids_M, numbers, right=True, out_int32=True)
    counts = torch.cat([offsets[:1], offsets.diff()])
    return order, counts, offsets


def dispatch(x_TC: Tensor, order: Tensor) -> Tensor:
    """(M, C): for each entry of `order` the row of its token."""
    top_k = len(order) // max(len(x_TC), 1)
    inverse_TK = _inverse(order).view(len(x_TC), top_k)
    return _Take.apply(x_TC, order // max(top_k, 1), inverse_TK)


def combine(rows_MC: Tensor, order: Tensor, weights_TK: Tensor) -> Tensor:
    """(T, C): for each token the weighted sum of its rows, k by k."""
    rows_MC_by_token = _Take.apply(rows_MC, _inverse(order), order[:, None])
    rows_TKC = rows_MC_by_token.view(*weights_TK.shape, -1)
    return (rows_TKC * weights_TK[:, :, None]).sum(1).to(rows_MC.dtype)


def grouped_mlp(
    x_MC: Tensor,
    offsets_E: Tensor,
    *,
    gate_up_E2FC: Tensor,
    down_ECF: Tensor,
    limit: float = 0.0,
) -> Tensor:
    """(M, C): down(silu(gate(x))·up(x)) of each row's expert; of 2F the first F are the gate.

    Rows are sorted by expert, those of expert e end before offsets_E[e] (int32); rows past the last
    offset give 0. Every expert gets a gradient, zeros where it has no rows.
    """
    refused = grouped_refusal(x_MC, gate_up_E2FC, down_ECF)
    product = looped_product if refused else grouped_product
    is_routed = torch.arange(len(x_MC), device=x_MC.device)[:, None] < offsets_E[-1]
    # Rows past the end may be garbage in a grouped product, forward and backward.
    hidden_M2F = product(_Mask.apply(x_MC, is_routed), gate_up_E2FC, offsets_E)
    gate_MF, up_MF = hidden_M2F.chunk(2, dim=-1)
    if limit:
        gate_MF, up_MF = clipped(gate_MF, up_MF, limit)
    return _Mask.apply(product(silu(gate_MF) * up_MF, down_ECF, offsets_E), is_routed)


def grouped_product(x_MC: Tensor, weight_EFC: Tensor, offsets_E: Tensor) -> Tensor:
    """(M, F) in one kernel."""
    weight_EFC = weight_EFC.contiguous()
    return grouped_mm(x_MC.contiguous(), weight_EFC.transpose(1, 2), offs=offsets_E)


def looped_product(x_MC: Tensor, weight_EFC: Tensor, offsets_E: Tensor) -> Tensor:
    """(M, F), expert by expert, for every dtype and shape; it waits for the offsets."""
    stops = offsets_E.tolist()
    sizes = [stop - start for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    *parts, past = x_MC.split_with_sizes([*sizes, len(x_MC) - stops[-1]])
    outputs = [linear(part, weight) for part, weight in zip(parts, weight_EFC, strict=True)]
    return torch.cat([*outputs, past.new_zeros(len(past), weight_EFC.shape[1])])


def _inverse(order: Tensor) -> Tensor:
    indices = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter(0, order, indices)


class _Take(torch.autograd.Function):
    """rows[index]; inverse (rows, k) says where each row went. Backward adds in the order of k."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        taken = grad.index_select(0, inverse.flatten())
        return taken.view(*inverse.shape, *grad.shape[1:]).sum(1), None, None


class _Mask(torch.autograd.Function):
    """0 where the mask is False, forward and backward, and contiguous in both."""

    @staticmethod
    def forward(ctx: Any, rows_MC: Tensor, mask_M1: Tensor) -> Tensor:
        ctx.save_for_backward(mask_M1)
        return torch.where(mask_M1, rows_MC.contiguous(), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask_M1,) = ctx.saved_tensors
        return torch.where(mask_M1, grad.contiguous(), 0.0), None
