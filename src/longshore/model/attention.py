"""Grouped-query attention as a mixer: project, rotate, attend, project.

In: hidden states (T, C), the context, the rotary tables. Out: (T, C). How a pack that lanes share
is served is chosen for each pack:

- `gather`: one gather of K and V over the group. Only the lane's own are kept for backward, which
  gathers again and then sums and scatters the gradients, so memory does not grow with the pack. At
  CP size 1 nothing travels. While one pack is attended to the next one travels: model/interface.py
  has the order.
- `heads`: an all-to-all gives each lane all tokens of its share of the heads, a second one brings
  the outputs back. The CP size must divide the KV heads.

With T rows a lane, H query heads, K KV heads of width D and CP size c, forward and backward bring
a lane 3·(c − 1)·T·2K·D numbers by gather (K and V twice, gradients once), and by heads
2·(1 − 1/c)·T·(2H + 2K)·D. `auto` takes heads where that is legal and fewer: with H = 32 and K = 8
they are 48 against 80 for each T·D at CP size 2, and 336 against 140 at CP size 8.

With `gate`, q_proj makes for each head its query and then a gate; the head's output is multiplied
by the gate's sigmoid.

T tokens, H query heads, K key and value heads, D dims of a head. With 32 heads, 8 KV heads and 64
dims at width 2048, 5 tokens become q (5, 32, 64), k and v (5, 8, 64), and (5, 2048) again.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from longshore.arch.attention import AttentionConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.model.attention_core import attend
from longshore.model.fill import NORM, RESIDUAL, Fill
from longshore.model.interface import LOCAL, Exchanges, Rows, ThreeStepMixer
from longshore.model.norm import RMSNorm
from longshore.model.rope import Tables
from longshore.ops.gate import sigmoid_gate
from longshore.ops.projections import projected
from longshore.ops.rope import rotate_both


class Attention(ThreeStepMixer):
    """exchanges: how the lane reaches rows of shared packs; set by parallel/apply.py."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "o_proj.weight": RESIDUAL,
        "q_norm.weight": NORM,
        "k_norm.weight": NORM,
    }

    def __init__(self, config: AttentionConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.exchanges: Exchanges = LOCAL
        self.rope = config.ropes[0] if config.ropes else None
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries * (2 if config.gate else 1), bias=config.bias)
        self.k_proj = nn.Linear(width, keys, bias=config.bias)
        self.v_proj = nn.Linear(width, keys, bias=config.bias)
        self.o_proj = nn.Linear(queries, width, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, norm) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, norm) if config.qk_norm else None

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        # −1 heads: under tensor parallelism a rank has only some of them.
        size = self.config.head_dim
        q_TX, k_TX, v_TX = projected(x_TC, (self.q_proj, self.k_proj, self.v_proj))
        k_TKD, v_TKD = k_TX.unflatten(-1, (-1, size)), v_TX.unflatten(-1, (-1, size))
        q_THD, gate_THD = self._queries(q_TX)
        q_THD, k_TKD = self._normed_rotated(q_THD, k_TKD, tables)
        return (q_THD, k_TKD, v_TKD), () if gate_THD is None else (gate_THD,)

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        for gate_THD in kept:
            mixed = sigmoid_gate(mixed, gate_THD)
        output_TC: Tensor = self.o_proj(mixed.flatten(-2))
        return output_TC

    def _queries(self, q_TX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries and, where the output is gated, gates."""
        size = self.config.head_dim
        if not self.config.gate:
            return q_TX.unflatten(-1, (-1, size)), None
        q_THD, gate_THD = q_TX.unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
        return q_THD, gate_THD

    def _normed_rotated(
        self, q_THD: Tensor, k_TKD: Tensor, tables: Tables
    ) -> tuple[Tensor, Tensor]:
        """Normed where there are norms, rotated where there is a table; one kernel for all."""
        table = None if self.rope is None else tables[self.rope]
        if self.q_norm is None or self.k_norm is None:
            return (q_THD, k_TKD) if table is None else rotate_both(q_THD, k_TKD, *table)
        if table is None:
            return self.q_norm(q_THD), self.k_norm(k_TKD)
        return self.q_norm.rotated_with(self.k_norm, q_THD, k_TKD, table)

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Tensor:
        q_THD, k_TKD, v_TKD = rows
        scale, window = self.config.head_dim**-0.5, self.config.window
        return attend(ctx, self.exchanges, q_THD, k_TKD, v_TKD, scale=scale, window=window)
