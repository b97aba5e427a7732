"""Expert parallelism: tokens travel to the ranks that have their experts, and back.

In: a decoder, on `meta` or with its parameters, and a topology. Out: the same decoder, with this
rank's experts alone in every layer of experts, and what sends and receives rows in its slot.

    route → send rows, ids and weights → this rank's experts, weighted and summed → send back → sum

One row for each token and rank that has at least one of its experts. 4 experts on 2 ranks, so rank
0 has experts 0 and 1; three tokens with ids [[0, 1], [3, 0], [4, 4]], where 4 is no expert:

    chosen_TR     t0 → 2 on rank 0     t1 → 1 on rank 0, 1 on rank 1     t2 → none
    rows_M        0 1 1                the token of each row, sorted by rank; sends are 2 and 1
    positions_TN  [[0, 3], [1, 2], [3, 3]]     the rows of each token; 3 = M is a row of zeros

A rank copies each row that came for each of its own experts that the row chose, rank 0 the rows of
t0 t0 t1, and adds up what they make of it in the same way. Taking rows and summing them are each
other's backward, so nothing is added in an order that threads choose. Sums are made in float32 at
least, and rounded more often than without EP: for each expert, for each rank, and for all.

T tokens, K experts a token, C channels, R ranks, M rows sent or received, P choices of received
rows among this rank's experts, N = min(K, R) rows a token at most.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from longshore.arch.cuts import expert_cut
from longshore.arch.decoder import check_ep
from longshore.distributed.collectives import all_to_all
from longshore.distributed.topology import Topology
from longshore.model.decoder import Decoder
from longshore.model.feed_forward import ExpertRun, MoE


def split_experts(model: Decoder, topology: Topology) -> None:
    """Leaves each layer of experts those of this rank, in place; nothing without TP and EP."""
    check_ep(model.config, topology.ep)
    if topology.experts is None:
        return
    for layer, moe in model.named_modules():
        if not isinstance(moe, MoE):
            continue
        cut = expert_cut(moe.config.experts, ep=topology.ep, ep_rank=topology.ep_rank)
        (span,) = cut.spans
        for name in ("gate_up", "down"):
            whole: nn.Parameter = getattr(moe.experts, name)
            # Cloned, so that the memory of the others is freed.
            own = whole.detach()[span.start : span.stop].clone()
            setattr(moe.experts, name, nn.Parameter(own, requires_grad=whole.requires_grad))
            model.cuts[f"{layer}.experts.{name}"] = cut
        if topology.ep > 1:
            group = topology.experts.ep
            moe.experts.dispatch = partial(exchanged, experts=moe.config.experts, group=group)


def exchanged(
    run: ExpertRun,
    x_TC: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    experts: int,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """(T, C), and how many of this rank's own tokens chose each of all experts, int32 (E).

    run: of this rank's experts. Every rank of the group calls it, with any tokens.
    """
    each = experts // group.size()
    chosen_TR = chosen_on_ranks(ids_TK, each, group.size())
    sends, receives, pairs = _counts(chosen_TR, group)
    copies = rank_copies(chosen_TR > 0, sum(sends), ids_TK.shape[1])
    # Ids travel with the weights: below 2**24 a float32 holds them exactly.
    wide = torch.promote_types(weights_TK.dtype, torch.float32)
    choices = torch.cat([weights_TK.to(wide), ids_TK.to(wide)], dim=1)
    x_MC, choices = (
        all_to_all(_taken(rows, copies), group, sends=sends, receives=receives)
        for rows in (x_TC, choices)
    )
    own, own_ids, own_weights = own_choices(choices, each, group.rank(), pairs)
    y_PC = _run_some(run, _taken(x_MC, own), own_ids, own_weights)
    back_MC = all_to_all(_summed(y_PC, own), group, sends=receives, receives=sends)
    return _summed(back_MC, copies), count_experts(ids_TK, experts)


def _run_some(run: ExpertRun, x_PC: Tensor, ids_P1: Tensor, weights_P1: Tensor) -> Tensor:
    """The experts on rows that came, or on one row of no expert, for a gradient in every round."""
    if len(x_PC):
        return run(x_PC, ids_P1, weights_P1)[0]
    x_PC, weights_P1 = (pad(rows, (0, 0, 0, 1)) for rows in (x_PC, weights_P1))
    nowhere = ids_P1.new_full(weights_P1.shape, torch.iinfo(ids_P1.dtype).max)
    return run(x_PC, nowhere, weights_P1)[0][:0]


class Copies(NamedTuple):
    """Which rows are copied, and where the copies of each are."""

    rows: Tensor
    """int64: the row of each copy."""
    positions: Tensor
    """int64 (rows, N): the copies of each row, rising; one past the last where it has fewer."""


def own_choices(choices: Tensor, each: int, rank: int, pairs: int) -> tuple[Copies, Tensor, Tensor]:
    """The choices of received rows among this rank's experts: a copy of a row for each of them,
    the ids (P, 1), counted from the rank's first expert, and the weights (P, 1).

    choices: (M, 2·K), weights and then ids. each: the experts of a rank. pairs: P.
    """
    weights_MK, ids_MK = choices.chunk(2, dim=1)
    ids_MK = ids_MK.to(torch.int64) - rank * each
    is_own = (ids_MK >= 0) & (ids_MK < each)
    places, index_P = _numbered(is_own.flatten(), pairs)
    rows, top_k = ids_MK.shape
    positions = places.view(rows, top_k).sort(dim=1).values[:, : min(top_k, each)].contiguous()
    ids_P1, weights_P1 = (
        part.flatten().index_select(0, index_P)[:, None] for part in (ids_MK, weights_MK)
    )
    return Copies(index_P // top_k, positions), ids_P1, weights_P1


def _numbered(is_taken: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each place its number among the `count` that are taken, else `count`; and these places.

    The host knows the count, so it does not wait.
    """
    numbers = torch.where(is_taken, is_taken.cumsum(0) - 1, count)
    places = torch.arange(len(numbers), device=numbers.device)
    # What is not taken goes to number `count`, which is cut off.
    return numbers, numbers.new_empty(count + 1).scatter(0, numbers, places)[:count]


def count_experts(ids_TK: Tensor, experts: int) -> Tensor:
    """int32 (E): how many rows chose each expert; ids of E or more count nowhere."""
    counts = ids_TK.new_zeros(experts + 1, dtype=torch.int32)
    ones = counts.new_ones(()).expand(ids_TK.numel())
    # Integers, so the order in which threads add cannot show; bincount would wait for the host.
    return counts.scatter_add_(0, ids_TK.flatten().clamp(max=experts), ones)[:experts]


def _counts(chosen_TR: Tensor, group: ProcessGroup) -> tuple[list[int], list[int], int]:
    """Rows for each rank of the group, rows from each, and P; the host waits for the device."""
    counts_R2 = torch.stack([(chosen_TR > 0).sum(0), chosen_TR.sum(0)], dim=1)
    ones = [1] * group.size()
    coming_R2 = all_to_all(counts_R2, group, sends=ones, receives=ones)
    (sends, _), (receives, pairs) = torch.stack([counts_R2, coming_R2]).mT.tolist()
    return sends, receives, sum(pairs)


def chosen_on_ranks(ids_TK: Tensor, each: int, ranks: int) -> Tensor:
    """int64 (T, R): how many of the token's experts a rank has; ids past the last are of none."""
    rank_TK = (ids_TK // each).clamp(max=ranks)
    chosen = ids_TK.new_zeros(len(ids_TK), ranks + 1)
    return chosen.scatter_add(1, rank_TK, torch.ones_like(rank_TK))[:, :ranks]


def rank_copies(sent_TR: Tensor, rows: int, top_k: int) -> Copies:
    """A copy of a token's row for each rank that it goes to, by rank and then by token.

    rows: M, the number of True.
    """
    tokens, ranks = sent_TR.shape
    places, index_M = _numbered(sent_TR.t().flatten(), rows)
    by_token = places.view(ranks, tokens).t().sort(dim=1).values
    return Copies(index_M % max(tokens, 1), by_token[:, : min(top_k, ranks)].contiguous())


def _taken(rows_TC: Tensor, copies: Copies) -> Tensor:
    """For each copy its row."""
    taken: Tensor = _Moved.apply(rows_TC, *copies, False)  # type: ignore[no-untyped-call]
    return taken


def _summed(copies_MC: Tensor, copies: Copies) -> Tensor:
    """For each row the sum of its copies, in their order."""
    summed: Tensor = _Moved.apply(copies_MC, *copies, True)  # type: ignore[no-untyped-call]
    return summed


class _Moved(torch.autograd.Function):
    """Takes the row of each copy, or sums each row's copies; either is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows_M: Tensor, positions_TN: Tensor, sums: bool) -> Tensor:  # noqa: ANN401
        ctx.sums = sums
        ctx.save_for_backward(rows_M if sums else positions_TN)
        return sum_rows(x, positions_TN) if sums else x.index_select(0, rows_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (index,) = ctx.saved_tensors
        moved = grad.index_select(0, index) if ctx.sums else sum_rows(grad, index)
        return moved, None, None, None


def sum_rows(rows_MC: Tensor, positions_TN: Tensor) -> Tensor:
    """(T, C): the sums of rows at these positions, of which M is a row of zeros."""
    wide = torch.promote_types(rows_MC.dtype, torch.float32)
    padded = torch.cat([rows_MC, rows_MC.new_zeros(1, rows_MC.shape[1])])
    first, *others = positions_TN.unbind(1)
    total_TC = padded.index_select(0, first).to(wide)
    for positions_T in others:
        total_TC += padded.index_select(0, positions_T)
    return total_TC.to(rows_MC.dtype)
