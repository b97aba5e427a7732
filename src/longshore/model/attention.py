"""Grouped-query attention as a mixer: project, turn, core, project.

In: hidden states (T, C), the context, the rotary tables. Out: (T, C). Tokens meet only in `core`,
a plain function (not a module) that is called core(q_THD, k_TKD, v_TKD, ctx, scale=…, window=…);
the default knows one lane, and parallel/ puts another in its place.

With `gate`, q_proj makes for each head its query and then a gate; the head's output is multiplied
by the gate's sigmoid.

T tokens, H query heads, K key and value heads, D dims of a head. With 32 heads, 8 KV heads and 64
dims at width 2048, 5 tokens become q (5, 32, 64), k and v (5, 8, 64), and (5, 2048) again.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from longshore.arch.attention import AttentionConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.model.fill import NORM, RESIDUAL, Fill
from longshore.model.norm import RMSNorm
from longshore.model.opaque import Context, opened
from longshore.model.rope import Tables
from longshore.model.whole import refuse_shared
from longshore.ops.attention import attention
from longshore.ops.rope import rotate


class Core(Protocol):
    """Causal attention inside each sequence of a context."""

    def __call__(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        ctx: SeqContext,
        /,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor: ...


def local_core(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    ctx: SeqContext,
    /,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention over packs that this lane holds whole."""
    made = []
    for pack in ctx.packs:
        refuse_shared(pack, "attention")
        rows = pack.rows
        made.append(
            attention(
                q_THD[rows],
                k_TKD[rows],
                v_TKD[rows],
                bounds=pack.padded,
                scale=scale,
                window=window,
            )
        )
    return made[0] if len(made) == 1 else torch.cat(made)


class Attention(nn.Module):
    """core: how tokens meet; see the module."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "o_proj.weight": RESIDUAL,
        "q_norm.weight": NORM,
        "k_norm.weight": NORM,
    }

    def __init__(self, config: AttentionConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.core: Core = local_core
        self.rope = config.ropes[0] if config.ropes else None
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries * (2 if config.gate else 1), bias=config.bias)
        self.k_proj = nn.Linear(width, keys, bias=config.bias)
        self.v_proj = nn.Linear(width, keys, bias=config.bias)
        self.o_proj = nn.Linear(queries, width, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, norm) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, norm) if config.qk_norm else None

    def forward(self, x_TC: Tensor, ctx: Context, tables: Tables) -> Tensor:
        # −1 heads: under tensor parallelism a rank has only some of them.
        q_THD, gate_THD = self._queries(x_TC)
        k_TKD = self.k_proj(x_TC).unflatten(-1, (-1, self.config.head_dim))
        v_TKD = self.v_proj(x_TC).unflatten(-1, (-1, self.config.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        if self.rope is not None:
            cos_TR, sin_TR = tables[self.rope]
            q_THD, k_TKD = rotate(q_THD, cos_TR, sin_TR), rotate(k_TKD, cos_TR, sin_TR)
        mixed_THD: Tensor = self._meet(q_THD, k_TKD, v_TKD, ctx)
        if gate_THD is not None:
            mixed_THD = mixed_THD * gate_THD.sigmoid()
        made: Tensor = self.o_proj(mixed_THD.flatten(-2))
        return made

    def _queries(self, x_TC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries and, where the output is gated, gates."""
        size = self.config.head_dim
        if not self.config.gate:
            return self.q_proj(x_TC).unflatten(-1, (-1, size)), None
        q_THD, gate_THD = self.q_proj(x_TC).unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
        return q_THD, gate_THD

    # A compiled block must not specialise on the packs, which change every round.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _meet(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, ctx: Context) -> Tensor:
        scale, window = self.config.head_dim**-0.5, self.config.window
        return self.core(q_THD, k_TKD, v_TKD, opened(ctx), scale=scale, window=window)
