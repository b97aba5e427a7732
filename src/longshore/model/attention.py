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
from typing import Any, ClassVar

from torch import Tensor, nn

from longshore.arch.attention import AttentionConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.choices import AttentionKind
from longshore.model.fill import NORM, RESIDUAL, Fill
from longshore.model.interface import (
    LOCAL,
    Exchange,
    Exchanges,
    Rows,
    ThreeStepMixer,
    joined,
)
from longshore.model.norm import RMSNorm
from longshore.model.rope import Tables
from longshore.model.visible_attention import attend_visible
from longshore.ops.attention import attention
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


def attend(
    ctx: SeqContext,
    exchanges: Exchanges,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(T, H, D): the core of attention, for all packs. softcap, sinks: see ops/attention.py."""
    heads, kv_heads, kind = q_THD.shape[1], k_TKD.shape[1], exchanges.attention
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    outputs: dict[int, Tensor] = {}
    gathered: dict[int, Exchange] = {}
    # Packs split over heads come before all others, on every lane: which way a pack takes
    # depends on its CP size alone, so that the order of the collectives stays one for all.
    # Backward is the mirror image, as autograd runs what was created last first.
    for place, exchange in enumerate(exchanges.each(ctx)):
        if over_heads(heads, kv_heads, exchange.size, kind=kind):
            outputs[place] = _attend_pack(exchange, (q_THD, k_TKD, v_TKD), sinks, options)
        else:
            gathered[place] = exchange
    if gathered:
        fetched = (k_TKD, v_TKD)
        visible = attend_visible(tuple(gathered.values()), q_THD, fetched, sinks=sinks, **options)
        outputs |= zip(gathered, visible, strict=True)
    return joined([outputs[place] for place in sorted(outputs)])


def _attend_pack(
    exchange: Exchange, parts: Rows, sinks: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """One pack whose heads the lanes share out."""
    rows, bounds = exchange.pack.rows, exchange.pack.padded
    q, k, v = exchange.to_heads(tuple(part[rows] for part in parts))
    if sinks is not None:
        sinks = sinks[exchange.rank * q.shape[1] : (exchange.rank + 1) * q.shape[1]]
    return exchange.from_heads(attention(q, k, v, bounds=bounds, sinks=sinks, **options))


def over_heads(heads: int, kv_heads: int, cp_size: int, *, kind: AttentionKind) -> bool:
    """Whether lanes share out the heads of a pack of this CP size; else they gather K and V."""
    if cp_size == 1 or kind == "gather":
        return False
    legal = kv_heads % cp_size == 0
    if kind == "heads" and not legal:
        raise ValueError(
            f"parallel.attention='heads': CP size {cp_size} does not divide the {kv_heads} KV "
            f"heads; plan with heads={kv_heads}, or use parallel.attention='gather'"
        )
    fewer = 3 * cp_size * kv_heads > 2 * (heads + kv_heads)
    return kind == "heads" or (legal and fewer)
