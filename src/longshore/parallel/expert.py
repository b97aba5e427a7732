"""Expert parallelism: tokens travel to the ranks that have their experts, and back.

In: a decoder, on `meta` or with its parameters, and a topology. Out: the same decoder, with this
rank's experts alone in every layer of experts, whose forward sends and receives rows.

    route → send rows, ids and weights → this rank's experts, weighted and summed → send back → sum

One row for each token and rank that has at least one of its experts. 4 experts on 2 ranks, so rank
0 has experts 0 and 1; three tokens with ids [[0, 1], [3, 0], [4, 4]], where 4 is no expert:

    sent_TR       t0 → rank 0     t1 → ranks 0 and 1     t2 → nowhere
    tokens_M      0 1 1           the token of each row, sorted by rank; sends are 2 and 1
    positions_TN  [[0, 3], [1, 2], [3, 3]]    the rows of each token; 3 = M is a row of zeros

Taking rows by `tokens_M` and summing them by `positions_TN` are each other's backward, so nothing
is added in an order that threads choose. The host waits for the device once a layer, to learn how
many rows come. Rows travel in their own dtype; those that come back are summed in float32 at least,
and rounded once more, where half precision is used, than the experts of one rank would be: each
rank rounds the weighted sum of its own experts.

A rank that gets no rows runs its experts on one row of no expert, so their gradients are there, 0,
in every round.

T tokens, K experts a token, C channels, R ranks, M rows sent, N = min(K, R) rows a token at most.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from longshore.arch.expert_cuts import check_ep, expert_cut
from longshore.distributed.collectives import all_to_all
from longshore.distributed.topology import Topology
from longshore.model.decoder import Decoder
from longshore.model.feed_forward import Experts, MoE

ExpertForward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""x (T, C), ids (T, K), weights (T, K) → (T, C) and counts (E)."""


def split_experts(model: Decoder, topology: Topology) -> None:
    """Leaves each layer of experts those of this rank, in place; nothing without TP and EP."""
    check_ep(model.config, topology.ep)
    if topology.experts is None:
        return
    for module in model.modules():
        if isinstance(module, MoE):
            _split(module.experts, module.config.experts, topology)


def _split(experts: Experts, number: int, topology: Topology) -> None:
    cut = expert_cut(number, ep=topology.ep, ep_rank=topology.ep_rank)
    (span,) = cut.spans
    names = ("gate_up", "down")
    for name in names:
        whole: nn.Parameter = getattr(experts, name)
        # Cloned, so that the memory of the others is freed.
        own = whole.detach()[span.start : span.stop].clone()
        setattr(experts, name, nn.Parameter(own, requires_grad=whole.requires_grad))
    experts.cuts = dict.fromkeys(names, cut)  # type: ignore[assignment]
    if topology.ep > 1:
        assert topology.experts is not None
        local, group = experts.forward, topology.experts.ep
        experts.forward = partial(exchanged, local, experts=number, group=group)  # type: ignore[method-assign]


def exchanged(
    run: ExpertForward,
    x_TC: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    experts: int,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """(T, C), and how many of this rank's own tokens chose each of all experts, int32 (E).

    run: the forward of this rank's experts. Every rank of the group calls it, with any tokens.
    """
    route = make_route(ids_TK, experts // group.size(), group)
    # Ids travel with the weights: below 2**24 a float32 holds them exactly.
    wide = torch.promote_types(weights_TK.dtype, torch.float32)
    choices = torch.cat([weights_TK.to(wide), ids_TK.to(wide)], dim=1)
    x_MC, choices = (
        all_to_all(_taken(rows, route), group, sends=route.sends, receives=route.receives)
        for rows in (x_TC, choices)
    )
    own = own_choices(choices, experts // group.size(), group.rank())
    y_MC = _run_some(run, x_MC, *own)
    back_MC = all_to_all(y_MC, group, sends=route.receives, receives=route.sends)
    return _summed(back_MC, route), count_experts(ids_TK, experts)


def _run_some(run: ExpertForward, x_MC: Tensor, ids_MK: Tensor, weights_MK: Tensor) -> Tensor:
    """The experts on rows that came, or on one row of weight 0 if none did."""
    if len(x_MC):
        return run(x_MC, ids_MK, weights_MK)[0]
    x_MC, weights_MK = (pad(rows, (0, 0, 0, 1)) for rows in (x_MC, weights_MK))
    nowhere = ids_MK.new_full(weights_MK.shape, torch.iinfo(ids_MK.dtype).max)
    return run(x_MC, nowhere, weights_MK)[0][:0]


def own_choices(choices: Tensor, each: int, rank: int) -> tuple[Tensor, Tensor]:
    """Of the choices of rows those of this rank's `each` experts, counted from 0.

    choices: (M, 2·K), weights and then ids. Returns ids, `each` for the experts of other ranks, and
    weights, there 0.
    """
    weights_MK, ids_MK = choices.chunk(2, dim=1)
    ids_MK = ids_MK.to(torch.int64) - rank * each
    is_own = (ids_MK >= 0) & (ids_MK < each)
    return torch.where(is_own, ids_MK, each), torch.where(is_own, weights_MK, 0.0)


def count_experts(ids_TK: Tensor, experts: int) -> Tensor:
    """int32 (E): how many rows chose each expert; ids of E or more count nowhere."""
    counts = ids_TK.new_zeros(experts + 1, dtype=torch.int32)
    ones = counts.new_ones(()).expand(ids_TK.numel())
    # Of integers, so the order in which threads add cannot show; bincount would wait for the host.
    return counts.scatter_add_(0, ids_TK.flatten().clamp(max=experts), ones)[:experts]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRoute:
    """Which rows go where. Rows are sorted by the rank they go to, then by token."""

    tokens: Tensor
    """int64 (M): the token of each row sent."""
    positions: Tensor
    """int64 (T, N): the rows of each token, rising; M where it has fewer."""
    sends: list[int]
    """Rows for each rank of the group."""
    receives: list[int]
    """Rows from each."""


def make_route(ids_TK: Tensor, each: int, group: ProcessGroup) -> ExpertRoute:
    """Every rank of the group calls it. each: the experts of a rank."""
    sent_TR = destinations(ids_TK, each, group.size())
    counts = sent_TR.sum(0)
    ones = [1] * group.size()
    coming = all_to_all(counts, group, sends=ones, receives=ones)
    sends, receives = torch.stack([counts, coming]).tolist()
    tokens_M, positions_TN = rows_and_positions(sent_TR, sum(sends), ids_TK.shape[1])
    return ExpertRoute(tokens_M, positions_TN, sends, receives)


def destinations(ids_TK: Tensor, each: int, ranks: int) -> Tensor:
    """bool (T, R): whether a rank has one of the token's experts; ids past the last are of none."""
    rank_TK = (ids_TK // each).clamp(max=ranks)
    sent = torch.zeros(len(ids_TK), ranks + 1, dtype=torch.bool, device=ids_TK.device)
    return sent.scatter(1, rank_TK, True)[:, :ranks]


def rows_and_positions(sent_TR: Tensor, rows: int, top_k: int) -> tuple[Tensor, Tensor]:
    """tokens_M and positions_TN of an ExpertRoute. rows: M, the number of True."""
    tokens, ranks = sent_TR.shape
    sent = sent_TR.t().flatten()
    places = torch.where(sent, sent.cumsum(0) - 1, rows)
    token_of = torch.arange(tokens, device=sent.device).repeat(ranks)
    # What is not sent goes to place M, which is cut off.
    tokens_M = places.new_empty(rows + 1).scatter(0, places, token_of)[:rows]
    by_token = places.view(ranks, tokens).t().sort(dim=1).values
    return tokens_M, by_token[:, : min(top_k, ranks)].contiguous()


def _taken(rows_TC: Tensor, route: ExpertRoute) -> Tensor:
    """(M, C): for each row sent, that of its token."""
    taken: Tensor = _Taken.apply(rows_TC, route.tokens, route.positions)  # type: ignore[no-untyped-call]
    return taken


def _summed(rows_MC: Tensor, route: ExpertRoute) -> Tensor:
    """(T, C): for each token the sum of its rows, in the order of the ranks."""
    summed: Tensor = _Summed.apply(rows_MC, route.tokens, route.positions)  # type: ignore[no-untyped-call]
    return summed


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TC: Tensor, tokens_M: Tensor, positions_TN: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(positions_TN)
        return rows_TC.index_select(0, tokens_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (positions_TN,) = ctx.saved_tensors
        return sum_rows(grad_MC, positions_TN), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MC: Tensor, tokens_M: Tensor, positions_TN: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tokens_M)
        return sum_rows(rows_MC, positions_TN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (tokens_M,) = ctx.saved_tensors
        return grad_TC.index_select(0, tokens_M), None, None


def sum_rows(rows_MC: Tensor, positions_TN: Tensor) -> Tensor:
    """(T, C): the sums of rows at these positions, of which M is a row of zeros."""
    wide = torch.promote_types(rows_MC.dtype, torch.float32)
    padded = torch.cat([rows_MC, rows_MC.new_zeros(1, rows_MC.shape[1])])
    first, *others = positions_TN.unbind(1)
    total_TC = padded.index_select(0, first).to(wide)
    for positions_T in others:
        total_TC += padded.index_select(0, positions_T)
    return total_TC.to(rows_MC.dtype)
