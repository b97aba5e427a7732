"""The router: which experts a token goes to, with what weights, and what that costs in balance.

In: hidden states (T, C), each token by itself. Out: ids and weights of K experts each, and the
scores of all. Everything is in float32 at least, the weight too (see model/float32.py), because a
rounded score sends a token elsewhere.

T tokens, E experts, K of them a token, S sequences. With 4 experts, K = 2 and scores .4 .3 .2 .1 a
token goes to experts 0 and 1 with weights 4/7 and 3/7; a bias of .2 on expert 2 would send it to 0
and 2 with 4/6 and 2/6, since a bias chooses and does not weigh.

The balance loss of a sequence of n tokens is n·Σ_i f_i·P_i: f_i is E/K times the share of its
tokens that chose expert i, P_i the mean over them of the expert's share of all scores. n·P_i is a
sum over tokens, so a lane that knows the whole sequence's f adds up its own tokens alone. Even
choices and scores make it n.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from longshore.batch import SeqContext
from longshore.model.float32 import Float32Parameters
from longshore.model.moe_config import MoEConfig

TINY = 1e-20
"""Added to a divisor, so that scores that are all 0 do not divide by 0."""


class Chosen(NamedTuple):
    """ids, weights: (T, K). scores: (T, E), of all experts, without bias."""

    ids: Tensor
    weights: Tensor
    scores: Tensor


class Router(Float32Parameters):
    """bias: a buffer (E), or None; it begins at 0, and train/routing.py moves it."""

    bias: Tensor | None

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.register_buffer("bias", torch.zeros(config.experts) if config.bias else None)

    def forward(self, x_TC: Tensor) -> Chosen:
        wide = torch.promote_types(x_TC.dtype, torch.float32)
        logits_TE = nn.functional.linear(x_TC.to(wide), self.weight.to(wide))
        soft = self.config.score == "softmax"
        scores_TE = logits_TE.softmax(-1) if soft else logits_TE.sigmoid()
        with torch.no_grad():
            ids_TK = choose(scores_TE if self.bias is None else scores_TE + self.bias, self.config)
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.config.normalise:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + TINY)
        return Chosen(ids_TK, weights_TK * self.config.scale, scores_TE)


def choose(scores_TE: Tensor, config: MoEConfig) -> Tensor:
    """The ids (T, K) of the best experts, within the best groups where there are several."""
    if config.top_groups < config.groups:
        scores_TGE = scores_TE.unflatten(1, (config.groups, -1))
        best_TG = scores_TGE.topk(2, dim=2).values.sum(2)
        ids_TG = best_TG.topk(config.top_groups, dim=1).indices
        open_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter(1, ids_TG, True)
        scores_TE = torch.where(open_TG[:, :, None], scores_TGE, -torch.inf).flatten(1)
    return scores_TE.topk(config.top_k, dim=1).indices


def count_by_sequence(ids_TK: Tensor, experts: int, ctx: SeqContext) -> Tensor:
    """(S + 1, E) int64: how many of this lane's tokens chose each expert; the last row: padding."""
    places_TK = ctx.sequence_index[:, None] * experts + ids_TK
    counts = places_TK.new_zeros(len(ctx.lengths) * experts)
    # Of integers, so the order in which threads add cannot show.
    counts.scatter_add_(0, places_TK.flatten(), torch.ones_like(places_TK).flatten())
    return counts.view(-1, experts)


def balance_loss(counts_SE: Tensor, chosen: Chosen, ctx: SeqContext) -> Tensor:
    """This lane's part of the sum over sequences of n·Σ f·P. counts: (S + 1, E), of all lanes."""
    scores_TE, top_k = chosen.scores, chosen.ids.shape[1]
    shares_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + TINY)
    even_SE = counts_SE.to(scores_TE.dtype) / ctx.lengths[:, None]
    load_TE = even_SE.index_select(0, ctx.sequence_index) * (counts_SE.shape[1] / top_k)
    return torch.where(ctx.is_real, (load_TE * shares_TE).sum(1), 0.0).sum()
