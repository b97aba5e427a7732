"""Attention over the lanes of a CP group: the core that parallel/apply.py puts into the model.

In: a lane's queries, keys and values, and the micro-batch's context. Out: the lane's attention
output. The way is chosen anew for each pack:

- CP size 1: the op alone; nothing is exchanged.
- `gather`: one gather of K and V over the group. Only the shards are kept for backward, which
  gathers again and then sums and scatters the gradients, so memory does not grow with the pack.
- `heads`: an all-to-all gives each lane all tokens of its share of the heads, a second one brings
  the outputs back. The CP size must divide the KV heads.

With T rows a lane, H query heads, K KV heads of width D and CP size c, forward and backward bring
a lane 3·(c − 1)·T·2K·D numbers by gather (K and V twice, gradients once), and by heads
2·(1 − 1/c)·T·(2H + 2K)·D. `auto` takes heads where that is legal and fewer: with H = 32 and K = 8
they are 48 against 80 for each T·D at CP size 2, and 336 against 140 at CP size 8.

T tokens of the lane; N = c·T of the pack; H query heads, K KV heads; D, V widths of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from longshore.batch import PackContext, SeqContext
from longshore.distributed.cp_groups import CPGroups
from longshore.ops.attention import attention, attention_backward, attention_forward
from longshore.parallel.context.heads import from_heads, to_heads
from longshore.parallel.context.seen import fetch_seen, return_seen

Kind = Literal["auto", "gather", "heads"]


@dataclass(frozen=True, slots=True)
class Shared:
    """A pack that several lanes hold, their group, and the numbers of the attention."""

    pack: PackContext
    group: ProcessGroup
    scale: float | None
    window: int | None


Way = Callable[[Tensor, Tensor, Tensor, Shared], Tensor]


class ContextAttention:
    """The core of attention for packs of any CP size."""

    def __init__(self, groups: CPGroups, kind: Kind = "auto") -> None:
        self.groups = groups
        self.kind = kind

    def __call__(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        ctx: SeqContext,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        outputs = []
        for pack in ctx.packs:
            q, k, v = q_THD[pack.rows], k_TKD[pack.rows], v_TKV[pack.rows]
            if pack.group.cp_size == 1:
                out = attention(q, k, v, bounds=pack.padded, scale=scale, window=window)
            else:
                group = self.groups.group(pack.group.first_lane, pack.group.cp_size)
                way = self._way(q.shape[1], k.shape[1], pack.group.cp_size)
                out = way(q, k, v, Shared(pack, group, scale, window))
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _way(self, heads: int, kv_heads: int, cp_size: int) -> Way:
        legal = kv_heads % cp_size == 0
        if self.kind == "heads" and not legal:
            raise ValueError(
                f"attention over heads: CP size {cp_size} does not divide the {kv_heads} KV heads; "
                f"plan with heads={kv_heads}, or use parallel.attention='gather'"
            )
        fewer = 3 * cp_size * kv_heads > 2 * (heads + kv_heads)
        if self.kind == "heads" or (self.kind == "auto" and legal and fewer):
            return by_heads
        return by_gather


def by_gather(q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, shared: Shared) -> Tensor:
    """Each lane's queries against all keys of the pack that they may see."""
    out: Tensor = _Gathered.apply(q_THD, k_TKD, v_TKV, shared)  # type: ignore[no-untyped-call]
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:  # noqa: ANN401
        seen_k, seen_v = _seen(k, v, shared)
        out, lse = attention_forward(q, seen_k, seen_v, **_options(shared))
        ctx.shared = shared
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401
        q, k, v, out, lse = ctx.saved_tensors
        shared: Shared = ctx.shared
        seen_k, seen_v = _seen(k, v, shared)
        dq, dk, dv = attention_backward(grad, q, seen_k, seen_v, out, lse, **_options(shared))
        back = return_seen(_rows(dk, dv), shared.pack, shared.group)
        return dq, *_parts(back, k, v), None


def _options(shared: Shared) -> dict[str, Any]:
    zigzag = shared.pack.zigzag
    assert zigzag is not None
    bounds = {"bounds": zigzag.chunks, "key_bounds": zigzag.seen}
    return {**bounds, "scale": shared.scale, "window": shared.window}


def _seen(k: Tensor, v: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """The keys and values that each chunk of this lane may see, chunk after chunk."""
    return _parts(fetch_seen(_rows(k, v), shared.pack, shared.group), k, v)


def _rows(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values of a token in one row, so that one exchange carries both."""
    return torch.cat([k.flatten(1), v.flatten(1)], dim=1)


def _parts(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The reverse of _rows, for heads shaped as these."""
    keys, values = rows.split([k[0].numel(), v[0].numel()], dim=1)
    return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])


def by_heads(q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, shared: Shared) -> Tensor:
    """All tokens of the pack against each other, each lane with its share of the heads."""
    pack, group = shared.pack, shared.group
    q, k, v = to_heads((q_THD, k_TKD, v_TKV), pack, group)
    out = attention(q, k, v, bounds=pack.padded, scale=shared.scale, window=shared.window)
    return from_heads(out, pack, group)
