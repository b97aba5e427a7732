"""A layer of experts: route, sort by expert, each expert's SwiGLU, weigh and sum; a shared expert.

In: hidden states (T, C) and the context. Out: (T, C), and what the experts did: their part of the
balance loss and how many tokens each got. Padding goes to no expert and counts nowhere; every
expert gets a gradient in every round, zeros where no token chose it.

Tokens of one sequence meet only in its counts, over the lanes that share it: `core`, a plain
function that is called core(counts_SE, ctx) where there is a balance loss; the default knows one
lane, and parallel/ puts another in its place.

T tokens, E experts, K of them a token, C channels, F channels inside an expert, S sequences. With
8 experts and K = 2, 5 tokens become 10 rows sorted by expert, and 5 rows again.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from longshore.batch import SeqContext
from longshore.model.config import MLPConfig
from longshore.model.fill import RESIDUAL, Fill
from longshore.model.mlp import MLP
from longshore.model.moe_config import MoEConfig
from longshore.model.opaque import Context, opened
from longshore.model.output import Routed
from longshore.model.part import Norm
from longshore.model.router import Chosen, Router, balance_loss, count_by_sequence
from longshore.model.whole import refuse_shared
from longshore.ops.experts import combine, dispatch, grouped_mlp, sort_by_expert


class Core(Protocol):
    """Counts (S + 1, E) of this lane's tokens to those of whole sequences; the last row is free."""

    def __call__(self, counts_SE: Tensor, ctx: SeqContext, /) -> Tensor: ...


def local_core(counts_SE: Tensor, ctx: SeqContext, /) -> Tensor:
    """The counts as they are, for packs that this lane holds whole."""
    for pack in ctx.packs:
        refuse_shared(pack, "balance loss")
    return counts_SE


class Experts(nn.Module):
    """gate_up: (E, 2F, C), of 2F the first F are the gate. down: (E, C, F)."""

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.width, width))
        self.down = nn.Parameter(torch.empty(config.experts, width, config.width))
        nn.init.normal_(self.gate_up, std=width**-0.5)
        nn.init.normal_(self.down, std=config.width**-0.5)

    def forward(self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """(T, C), and how many tokens each expert got, int32 (E). An id of E is of no expert."""
        order, counts_E, offsets_E = sort_by_expert(ids_TK, len(self.down))
        rows_MC = grouped_mlp(
            dispatch(x_TC, order), offsets_E, gate_up_E2FC=self.gate_up, down_ECF=self.down
        )
        return combine(rows_MC, order, weights_TK), counts_E


class MoE(nn.Module):
    """core: how counts of shared sequences meet; see the module."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "experts.down": RESIDUAL,
        "shared.down_proj.weight": RESIDUAL,
    }

    def __init__(self, config: MoEConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.core: Core = local_core
        self.router = Router(config, width)
        self.experts = Experts(config, width)
        self.shared = self.shared_gate = None
        if config.shared_width:
            self.shared = MLP(MLPConfig(width=config.shared_width), width, norm=norm)
        if config.shared_gate:
            self.shared_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x_TC: Tensor, ctx: Context) -> tuple[Tensor, Routed]:
        made_TC, auxiliary, counts_E = self._routed(x_TC, ctx)
        if self.shared is not None:
            shared_TC, _ = self.shared(x_TC, ctx)
            if self.shared_gate is not None:
                shared_TC = self.shared_gate(x_TC).sigmoid() * shared_TC
            made_TC = made_TC + shared_TC
        return made_TC, Routed(auxiliary, counts_E)

    # A compiled block must not specialise on the packs, which change every round.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _routed(self, x_TC: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """The experts' output, their part of the balance loss, and their counts."""
        ctx = opened(context)
        chosen = self.router(x_TC)
        real_T1 = ctx.is_real[:, None]
        ids_TK = torch.where(real_T1, chosen.ids, self.config.experts)
        weights_TK = torch.where(real_T1, chosen.weights, 0.0)
        made_TC, counts_E = self.experts(x_TC, ids_TK, weights_TK)
        return made_TC, self._auxiliary(chosen, ctx), counts_E

    def _auxiliary(self, chosen: Chosen, ctx: SeqContext) -> Tensor:
        if not self.config.aux_weight:
            return chosen.scores.new_zeros(())
        counts_SE = count_by_sequence(chosen.ids, self.config.experts, ctx)
        return self.config.aux_weight * balance_loss(self.core(counts_SE, ctx), chosen, ctx)
