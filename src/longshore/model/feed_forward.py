"""Feed-forward parts: a dense MLP, or a layer of experts.

The MLP takes hidden states (T, C), each token by itself, and returns (T, C). SwiGLU is
down(silu(gate(x)) · up(x)), relu2 is down(relu(up(x))²). With all weights 1, C = 1 and width 2, the
token 1 becomes 2·silu(1) = 1.462, and by relu2 the token 3 becomes 2·3² = 18.

A layer of experts: route, sort by expert, each expert's SwiGLU, weigh and sum; a shared expert. In:
hidden states (T, C) and the context. Out: (T, C), and what the experts did: their part of the
balance loss and how many tokens each got. Padding goes to no expert and counts nowhere; every
expert gets a gradient in every round, zeros where no token chose it.

T tokens, E experts, K of them a token, C channels, F channels inside an expert, S sequences. With
8 experts and K = 2, 5 tokens become 10 rows sorted by expert, and 5 rows again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.model.fill import RESIDUAL, Fill
from longshore.model.interface import LOCAL, Context, Exchanges, Routed, Rows, eager
from longshore.model.norm_rope import Float32Parameters
from longshore.ops.experts import expert_mlp
from longshore.ops.linear import LowRank, projected
from longshore.ops.pointwise import clipped, gated_linear


class GatedLinear(nn.Linear):
    """A product with what gate and up make together, which is not kept for backward by kernels."""

    def forward(self, up_TF: Tensor, gate_TF: Tensor | None = None) -> Tensor:
        return gated_linear(gate_TF, up_TF, self.weight)


class AdaptedGatedLinear(GatedLinear):
    """lora: low-rank factors, see ops/linear.py."""

    lora: LowRank

    def forward(self, up_TF: Tensor, gate_TF: Tensor | None = None) -> Tensor:
        inner_TR = gated_linear(gate_TF, up_TF, self.lora.a)
        return self.lora.onto(super().forward(up_TF, gate_TF), inner_TR)


class MLP(nn.Module):
    """gate_proj: None where the activation has no gate."""

    FILLS: ClassVar[Mapping[str, Fill]] = {"down_proj.weight": RESIDUAL}

    def __init__(self, config: MLPConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.limit = config.limit
        self.gate_proj = nn.Linear(width, config.width, bias=False) if config.gated else None
        self.up_proj = nn.Linear(width, config.width, bias=False)
        self.down_proj = GatedLinear(config.width, width, bias=False)

    def forward(self, x_TC: Tensor, ctx: Context) -> tuple[Tensor, None]:
        if self.gate_proj is None:
            return self.down_proj(self.up_proj(x_TC)), None
        up_TF, gate_TF = projected(x_TC, (self.up_proj, self.gate_proj))
        if self.limit:
            gate_TF, up_TF = clipped(gate_TF, up_TF, self.limit)
        return self.down_proj(up_TF, gate_TF), None


TINY = 1e-20
"""Added to a divisor, so that scores that are all 0 do not divide by 0."""


LEAST_LOGIT = -80.0
"""Below, softplus may be 0 in float32, and the derivative of its root infinite."""

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_TE: logits_TE.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt-softplus": lambda logits_TE: softplus(logits_TE.clamp(min=LEAST_LOGIT)).sqrt(),
}


class Router(Float32Parameters):
    """Works in float32 at least, its weight too: a rounded score sends a token elsewhere.

    With 4 experts, K = 2 and scores .4 .3 .2 .1 a token goes to experts 0 and 1 with weights 4/7
    and 3/7; a bias of .2 on expert 2 would send it to 0 and 2 with 4/6 and 2/6, since a bias
    chooses and does not weigh. bias: a buffer (E), or None; it begins at 0, and train/optimizer.py
    moves it. table: a buffer int64 (V, K), or None: the experts of each token id, frozen; then
    scores only weigh, and there is neither bias nor balance loss.
    """

    bias: Tensor | None
    table: Tensor | None

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.register_buffer("bias", torch.zeros(config.experts) if config.bias else None)
        table = None
        if config.hash_rows:
            first = torch.arange(config.top_k)
            table = first.expand(config.hash_rows, config.top_k).clone()
        self.register_buffer("table", table)

    def forward(self, x_TC: Tensor, token_ids: Tensor | None = None) -> Rows:
        """Ids and weights of the chosen experts (T, K), and scores of all, without bias (T, E)."""
        wide = torch.promote_types(x_TC.dtype, torch.float32)
        logits_TE = nn.functional.linear(x_TC.to(wide), self.weight.to(wide))
        scores_TE = SCORES[self.config.score](logits_TE)
        with torch.no_grad():
            if self.table is None:
                biased_TE = scores_TE if self.bias is None else scores_TE + self.bias
                ids_TK = choose(biased_TE, self.config)
            else:
                assert token_ids is not None, "the decoder puts token ids into the context"
                ids_TK = self.table.index_select(0, token_ids)
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.config.normalise:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + TINY)
        return ids_TK, weights_TK * self.config.scale, scores_TE


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
    index_TK = ctx.sequence_index[:, None] * experts + ids_TK
    counts = index_TK.new_zeros(len(ctx.lengths) * experts)
    # Integers, so the order in which threads add cannot show.
    ones = index_TK.new_ones(()).expand(index_TK.numel())
    counts.scatter_add_(0, index_TK.flatten(), ones)
    return counts.view(-1, experts)


def balance_loss(counts_SE: Tensor, scores_TE: Tensor, top_k: int, ctx: SeqContext) -> Tensor:
    """This lane's part of the sum over sequences of n·Σ f·P. counts: (S + 1, E), of all lanes.

    The balance loss of a sequence of n tokens is n·Σ_i f_i·P_i: f_i is E/K times the share of its
    tokens that chose expert i, P_i the mean over them of the expert's share of all scores. n·P_i is
    a sum over tokens, so a lane that knows the whole sequence's f adds up its own tokens alone, and
    lanes that share a sequence exchange its counts alone. Even choices and scores make it n.
    """
    shares_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + TINY)
    even_SE = counts_SE.to(scores_TE.dtype) / ctx.lengths[:, None]
    load_TE = even_SE.index_select(0, ctx.sequence_index) * (counts_SE.shape[1] / top_k)
    return torch.where(ctx.is_real, (load_TE * shares_TE).sum(1), 0.0).sum()


ExpertRun = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""x (T, C), ids (T, K), weights (T, K) → (T, C) and counts (E)."""


class Experts(nn.Module):
    """gate_up: (E, 2F, C), of 2F the first F are the gate. down: (E, C, F).

    dispatch: called with an ExpertRun and its arguments where other ranks have some of the experts;
    set by parallel/expert.py. The module that FSDP gathers is called once, whatever tokens come.
    """

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.dispatch: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.limit = config.limit
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.width, width))
        self.down = nn.Parameter(torch.empty(config.experts, width, config.width))
        nn.init.normal_(self.gate_up, std=width**-0.5)
        nn.init.normal_(self.down, std=config.width**-0.5)

    def forward(self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """(T, C), and how many tokens each expert got, int32 (E). The id E stands for no expert."""
        run: ExpertRun = partial(  # the experts of this rank alone
            expert_mlp, gate_up_E2FC=self.gate_up, down_ECF=self.down, limit=self.limit
        )
        if self.dispatch is not None:
            return self.dispatch(run, x_TC, ids_TK, weights_TK)
        return run(x_TC, ids_TK, weights_TK)


class MoE(nn.Module):
    """A layer of experts: a router, the experts, and a shared expert that all tokens go through."""

    exchanges: Exchanges = LOCAL
    """How counts of shared sequences are summed; set by parallel/apply.py."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "experts.down": RESIDUAL,
        "shared.down_proj.weight": RESIDUAL,
    }

    def __init__(self, config: MoEConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, width)
        self.experts = Experts(config, width)
        self.shared = self.shared_gate = None
        if config.shared_width:
            self.shared = MLP(config.shared, width, norm=norm)
        if config.shared_gate:
            self.shared_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x_TC: Tensor, ctx: Context) -> tuple[Tensor, Routed]:
        output_TC, auxiliary, counts_E = self._routed(x_TC, ctx)
        if self.shared is not None:
            shared_TC, _ = self.shared(x_TC, ctx)
            if self.shared_gate is not None:
                shared_TC = self.shared_gate(x_TC).sigmoid() * shared_TC
            output_TC = output_TC + shared_TC
        return output_TC, Routed(auxiliary, counts_E)

    @eager
    def _routed(self, x_TC: Tensor, ctx: SeqContext) -> tuple[Tensor, Tensor, Tensor]:
        """The experts' output, their part of the balance loss, and their counts."""
        config = self.config
        ids_TK, weights_TK, scores_TE = self.router(x_TC, ctx.token_ids)
        real_T1 = ctx.is_real[:, None]
        output_TC, counts_E = self.experts(
            x_TC,
            torch.where(real_T1, ids_TK, config.experts),
            torch.where(real_T1, weights_TK, 0.0),
        )
        if not config.aux_weight:
            return output_TC, scores_TE.new_zeros(()), counts_E
        counts_SE = count_by_sequence(ids_TK, config.experts, ctx)
        self.exchanges.sum_counts(ctx, counts_SE)
        loss = balance_loss(counts_SE, scores_TE, config.top_k, ctx)
        return output_TC, config.aux_weight * loss, counts_E
