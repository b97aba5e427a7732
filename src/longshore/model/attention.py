"""Grouped-query attention as a mixer: project, rotate, attend, project.

In: hidden states (T, C), the context, the rotary tables. Out: (T, C). How a pack that lanes share
is served is chosen for each pack:

- `gather`: one gather of K and V over the group. Only the lane's own are kept for backward, which
  gathers again and then sums and scatters the gradients, so memory does not grow with the pack. At
  CP size 1 nothing travels.
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
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longshore.arch.attention import AttentionConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.choices import AttentionKind
from longshore.model.fill import NORM, RESIDUAL, Fill
from longshore.model.interface import (
    LOCAL,
    Context,
    Exchange,
    Exchanges,
    eager,
    over_packs,
)
from longshore.model.norm import RMSNorm
from longshore.model.rope import Tables
from longshore.ops.attention import attention, attention_backward, attention_forward
from longshore.ops.gate import sigmoid_gate
from longshore.ops.rope import rotate


class Attention(nn.Module):
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

    def forward(self, x_TC: Tensor, ctx: Context, tables: Tables) -> Tensor:
        # −1 heads: under tensor parallelism a rank has only some of them.
        q_THD, gate_THD = self._queries(x_TC)
        k_TKD = self.k_proj(x_TC).unflatten(-1, (-1, self.config.head_dim))
        v_TKD = self.v_proj(x_TC).unflatten(-1, (-1, self.config.head_dim))
        table = None if self.rope is None else tables[self.rope]
        q_THD = _normed_rotated(q_THD, self.q_norm, table)
        k_TKD = _normed_rotated(k_TKD, self.k_norm, table)
        attended_THD = self._attend(q_THD, k_TKD, v_TKD, ctx)
        if gate_THD is not None:
            attended_THD = sigmoid_gate(attended_THD, gate_THD)
        output_TC: Tensor = self.o_proj(attended_THD.flatten(-2))
        return output_TC

    def _queries(self, x_TC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries and, where the output is gated, gates."""
        size = self.config.head_dim
        if not self.config.gate:
            return self.q_proj(x_TC).unflatten(-1, (-1, size)), None
        q_THD, gate_THD = self.q_proj(x_TC).unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
        return q_THD, gate_THD

    @eager
    def _attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, ctx: SeqContext) -> Tensor:
        return over_packs(self._attend_pack, ctx, self.exchanges, q_THD, k_TKD, v_TKD)

    def _attend_pack(self, exchange: Exchange, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale, window = self.config.head_dim**-0.5, self.config.window
        if over_heads(q.shape[1], k.shape[1], exchange.size, kind=self.exchanges.attention):
            q, k, v = exchange.to_heads((q, k, v))
            bounds = exchange.pack.padded
            return exchange.from_heads(
                attention(q, k, v, bounds=bounds, scale=scale, window=window)
            )
        return attend_visible(exchange, q, (k, v), scale=scale, window=window)


def _normed_rotated(
    x_THD: Tensor, norm: RMSNorm | None, table: tuple[Tensor, Tensor] | None
) -> Tensor:
    """x normed where there is a norm, rotated where there is a table; one kernel for both."""
    if norm is None:
        return x_THD if table is None else rotate(x_THD, *table)
    if table is None:
        normed_THD: Tensor = norm(x_THD)
        return normed_THD
    return norm.rotated(x_THD, *table)


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


class KeysValues(Protocol):
    """How keys and values come from the rows that lanes exchange."""

    def make(self, rows: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor, Tensor]: ...

    def gradients(
        self, dk: Tensor, dv: Tensor, rows: tuple[Tensor, ...], weight: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Of the rows and of the weight, from those of keys and values."""
        ...


class AsTheyAre:
    """The rows are keys and values."""

    def make(self, rows: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = rows
        return k, v

    def gradients(
        self, dk: Tensor, dv: Tensor, rows: tuple[Tensor, ...], weight: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        return (dk, dv), None


def attend_visible(
    exchange: Exchange,
    q_THD: Tensor,
    rows: tuple[Tensor, ...],
    *,
    scale: float,
    window: int | None = None,
    weight: Tensor | None = None,
    keys_values: KeysValues | None = None,
) -> Tensor:
    """(T, H, V): the lane's queries against all rows of the pack that they may see.

    rows: of the lane's tokens, what others need of them to make keys and values. For backward only
    the lane's own rows are kept, with q and the output; the others' are fetched again.
    """
    spec = _Spec(exchange, keys_values or AsTheyAre(), scale, window)
    output: Tensor = _AttendVisible.apply(spec, q_THD, weight, *rows)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, slots=True, eq=False)
class _Spec:
    exchange: Exchange
    keys_values: KeysValues
    scale: float
    window: int | None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "bounds": self.exchange.bounds,
            "key_bounds": self.exchange.visible_bounds,
            "scale": self.scale,
            "window": self.window,
        }


class _AttendVisible(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        spec: _Spec,
        q: Tensor,
        weight: Tensor | None,
        *rows: Tensor,
    ) -> Tensor:
        k, v = spec.keys_values.make(spec.exchange.visible(rows), weight)
        output, lse = attention_forward(q, k, v, **spec.options)
        ctx.spec = spec
        ctx.save_for_backward(q, weight, output, lse, *rows)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, weight, output, lse, *rows = ctx.saved_tensors
        spec: _Spec = ctx.spec
        visible = spec.exchange.visible(tuple(rows))
        k, v = spec.keys_values.make(visible, weight)
        dq, dk, dv = attention_backward(grad, q, k, v, output, lse, **spec.options)
        dvisible, dweight = spec.keys_values.gradients(dk, dv, visible, weight)
        return None, dq, dweight, *spec.exchange.return_visible(dvisible)
