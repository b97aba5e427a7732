"""Attention as a mixer: grouped-query attention and multi-head latent attention (MLA).

In: hidden states (T, C), the context, the rotary tables. Out: (T, C). A mixer projects and rotates,
its core lets a lane's queries see the rows of their sequences, wherever those are, and it projects
back. How a pack that lanes share is served is chosen for each pack:

- `gather`: one gather of K and V over the group. Only the lane's own are kept for backward, which
  gathers again and then sums and scatters the gradients, so memory does not grow with the pack. At
  CP size 1 nothing travels. While one pack is attended to the next one travels: model/interface.py.
- `heads`: an all-to-all gives each lane all tokens of its share of the heads, a second one brings
  the outputs back. The CP size must divide the KV heads.

With 2 lanes and a sequence of 8 tokens, lane 0 has t0 t1 t6 t7: its chunk t0 t1 sees itself, its
chunk t6 t7 all 8, of which 4 come from lane 1. The gradients of these 4 go back to it.

T tokens, H query heads, K key and value heads, D dims of a head; MLA has letters of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longshore.arch.attention import AttentionConfig, Form, MLAConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.model.fill import NORM, RESIDUAL, Fill
from longshore.model.interface import (
    Exchange,
    Exchanges,
    PendingRows,
    Rows,
    ThreeStepMixer,
    backward_steps,
    forward_steps,
    joined,
)
from longshore.model.norm_rope import RMSNorm, Tables
from longshore.ops.attention import attention, attention_backward, attention_forward, sinks_gradient
from longshore.ops.linear import projected, whole_weight
from longshore.ops.pointwise import norm_rotate_both, rotate, rotate_both, sigmoid_gate
from longshore.ops.sizes import expanded_values, heads_at_once
from longshore.settings import AttentionKind


def attend(
    ctx: SeqContext,
    exchanges: Exchanges,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    sinks: Tensor | None = None,
    **options: Any,  # noqa: ANN401
) -> Tensor:
    """(T, H, D): the core of attention, for all packs.

    options: scale, window and softcap of ops/attention.py, as sinks are.
    """
    heads, kv_heads, kind = q_THD.shape[1], k_TKD.shape[1], exchanges.attention
    outputs: dict[int, Tensor] = {}
    gathered: dict[int, Exchange] = {}
    # Packs split over heads come before all others, on every lane: which way a pack takes
    # depends on its CP size alone, so that the order of the collectives stays one for all.
    # Backward is the mirror image, as autograd runs what was created last first.
    for pack, exchange in enumerate(exchanges.each(ctx)):
        if over_heads(heads, kv_heads, exchange.size, kind=kind):
            rows, bounds = exchange.pack.rows, exchange.pack.padded
            q, k, v = exchange.to_heads((q_THD[rows], k_TKD[rows], v_TKD[rows]))
            own = None if sinks is None else sinks.split(q.shape[1])[exchange.rank]
            output = attention(q, k, v, bounds=bounds, sinks=own, **options)
            outputs[pack] = exchange.from_heads(output)
        else:
            gathered[pack] = exchange
    if gathered:
        fetched = (k_TKD, v_TKD)
        visible = attend_visible(tuple(gathered.values()), q_THD, fetched, sinks=sinks, **options)
        outputs |= zip(gathered, visible, strict=True)
    return joined([outputs[pack] for pack in sorted(outputs)])


def over_heads(heads: int, kv_heads: int, cp_size: int, *, kind: AttentionKind) -> bool:
    """Whether lanes share out the heads of a pack of this CP size; else they gather K and V.

    With T rows a lane, H query heads, K KV heads of width D and CP size c, forward and backward
    bring a lane 3·(c − 1)·T·2K·D numbers by gather (K and V twice, gradients once), and by heads
    2·(1 − 1/c)·T·(2H + 2K)·D. `auto` takes heads where that is legal and fewer: with H = 32 and
    K = 8 they are 48 against 80 for each T·D at CP size 2, and 336 against 140 at CP size 8.
    """
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


ALL_HEADS = slice(None)

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def _some(x: MaybeTensor, heads: slice, dim: int = 0) -> MaybeTensor:
    """x of these heads; of all heads as it is."""
    if x is None or heads == ALL_HEADS:
        return x
    return x[heads] if dim == 0 else x[:, heads]


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """How MLA makes keys and values of latents; nope: dims of a key without position."""

    nope: int
    form: Form

    def head_groups(self, rows_SL: Tensor, weight_HXR: Tensor) -> list[slice]:
        """The heads whose keys and values are made together, group by group."""
        heads, product, rank = weight_HXR.shape
        if self.form == "absorbed":
            return [ALL_HEADS]
        key = self.nope + rows_SL.shape[1] - rank
        each = expanded_values(key, product, product - self.nope) * rows_SL.element_size()
        together = heads_at_once(len(rows_SL), heads, each)
        return [slice(first, first + together) for first in range(0, heads, together)]

    def make(self, rows_SL: Tensor, weight_HXR: Tensor) -> tuple[Tensor, Tensor]:
        """(S, H, D) and (S, H, V) of each head; absorbed, one head of (S, 1, L) and (S, 1, R)."""
        heads, _, rank = weight_HXR.shape
        if self.form == "absorbed":
            k_S1L = rows_SL.unsqueeze(1)
            return k_S1L, k_S1L[..., :rank]
        up_SHX = (rows_SL[:, :rank] @ weight_HXR.flatten(0, 1).T).unflatten(1, (heads, -1))
        rotated_SHE = rows_SL[:, None, rank:].expand(-1, heads, -1)
        k_SHD = torch.cat([up_SHX[..., : self.nope], rotated_SHE], dim=2)
        return k_SHD, up_SHX[..., self.nope :]

    def gradients(
        self, dk: Tensor, dv: Tensor, rows_SL: Tensor, weight_HXR: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the rows and of the weight, from those of keys and values."""
        rank = weight_HXR.shape[2]
        if self.form == "absorbed":
            drows_SL = dk.squeeze(1)
            drows_SL[:, :rank] += dv.squeeze(1)
            return drows_SL, None
        dup_SX = torch.cat([dk[..., : self.nope], dv], dim=2).flatten(1)
        drotated_SE = dk[..., self.nope :].sum(1)
        drows_SL = torch.cat([dup_SX @ weight_HXR.flatten(0, 1), drotated_SE], dim=1)
        return drows_SL, (dup_SX.T @ rows_SL[:, :rank]).view_as(weight_HXR)


def attend_visible(
    exchanges: tuple[Exchange, ...],
    q_THD: Tensor,
    rows: Rows,
    *,
    sinks: Tensor | None = None,
    weight: Tensor | None = None,
    latents: LatentExpansion | None = None,
    **options: Any,  # noqa: ANN401
) -> Rows:
    """For each of these packs (its rows, H, V): the lane's queries against all rows they may see.

    q_THD and rows are of all tokens of the lane, whether in these packs or not; rows: what others
    need of them, keys and values, or latents of which these are made with `weight`. For backward
    only the lane's own rows are kept, with q and the outputs; the others' are fetched again.
    options: scale, window and softcap of ops/attention.py, as sinks are.
    """
    packs = _VisiblePacks(exchanges, latents, options)
    outputs: Rows = _AttendVisible.apply(packs, q_THD, sinks, weight, *rows)  # type: ignore[no-untyped-call]
    return outputs


@dataclass(frozen=True, slots=True, eq=False)
class _VisiblePacks:
    """Packs that are attended to as `attend_visible` says it, one by one."""

    exchanges: tuple[Exchange, ...]
    latents: LatentExpansion | None
    options: dict[str, Any]

    def attend(
        self, pack: int, q: Tensor, rows: Rows, weight: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a pack, from the rows that it sees."""
        outputs, lses = [], []
        for heads, _, k, v in self._by_heads(rows, weight):
            output, lse = attention_forward(
                _some(q, heads, 1), k, v, sinks=_some(sinks, heads), **self._options(pack)
            )
            outputs.append(output)
            lses.append(lse)
        return joined(outputs, dim=1), joined(lses)

    def gradients(
        self, pack: int, saved: Rows, rows: Rows, weight: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Rows, Tensor | None]:
        """Gradients of q, of the rows and of the weight.

        saved: the output's gradient, q, the output and its log-sum-exp.
        """
        grad, q, output, lse = saved
        dqs, dweights, groups = list[Tensor](), list[Tensor](), list[Rows]()
        for heads, own, k, v in self._by_heads(rows, weight):
            dq, dk, dv = attention_backward(
                _some(grad, heads, 1),
                _some(q, heads, 1),
                k,
                v,
                _some(output, heads, 1),
                _some(lse, heads),
                sinks=_some(sinks, heads),
                **self._options(pack),
            )
            dqs.append(dq)
            if self.latents is None or own is None:
                groups.append((dk, dv))
                continue
            drows, dweight = self.latents.gradients(dk, dv, rows[0], own)
            groups.append((drows,))
            dweights += [] if dweight is None else [dweight]
        summed = tuple(_added(parts) for parts in zip(*groups, strict=True))
        return joined(dqs, dim=1), summed, joined(dweights) if dweights else None

    def _by_heads(
        self, rows: Rows, weight: Tensor | None
    ) -> Iterator[tuple[slice, Tensor | None, Tensor, Tensor]]:
        """Heads whose keys and values are made together, their weight, keys and values."""
        if self.latents is None or weight is None:
            k, v = rows
            yield ALL_HEADS, None, k, v
            return
        for heads in self.latents.head_groups(rows[0], weight):
            own = weight[heads]
            yield heads, own, *self.latents.make(rows[0], own)

    def _options(self, pack: int) -> dict[str, Any]:
        exchange = self.exchanges[pack]
        return self.options | {"bounds": exchange.bounds, "key_bounds": exchange.visible_bounds}

    def own(self, rows: Sequence[Tensor], pack: int) -> Rows:
        """The rows of one pack."""
        return tuple(part[self.exchanges[pack].pack.rows] for part in rows)

    def among_all(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """The packs' parts among the rows of all tokens, 0 at those of other packs."""
        if sum(part.shape[0] for part in parts) == like.shape[0]:
            return joined(parts)
        everything = torch.zeros_like(like)
        for exchange, part in zip(self.exchanges, parts, strict=True):
            everything[exchange.pack.rows] = part
        return everything


class _AttendVisible(torch.autograd.Function):
    """All packs in one node: autograd would run the packs' own nodes one after the other."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        packs: _VisiblePacks,
        q: Tensor,
        sinks: Tensor | None,
        weight: Tensor | None,
        *rows: Tensor,
    ) -> Rows:
        coming: dict[int, PendingRows] = {}
        results: dict[int, tuple[Tensor, Tensor]] = {}
        for action, pack in forward_steps([exchange.size for exchange in packs.exchanges]):
            own = packs.own(rows, pack)
            if action == "gather":
                coming[pack] = packs.exchanges[pack].begin_visible(own)
                continue
            visible = coming.pop(pack)() if pack in coming else own
            (q_pack,) = packs.own((q,), pack)
            results[pack] = packs.attend(pack, q_pack, visible, weight, sinks)
        outputs, lses = zip(*(results[pack] for pack in range(len(results))), strict=True)
        ctx.packs = packs
        ctx.save_for_backward(q, sinks, weight, *rows, *outputs, *lses)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        packs: _VisiblePacks = ctx.packs
        q, sinks, weight, *others = ctx.saved_tensors
        count = len(packs.exchanges)
        rows, outputs, lses = others[: -2 * count], others[-2 * count : -count], others[-count:]
        coming: dict[int, PendingRows] = {}
        returning: dict[int, PendingRows] = {}
        owed: dict[int, Rows] = {}
        dqs: dict[int, Tensor] = {}
        dweights: dict[int, Tensor | None] = {}
        dsinks: dict[int, Tensor | None] = {}
        for action, pack in backward_steps([exchange.size for exchange in packs.exchanges]):
            exchange, own = packs.exchanges[pack], packs.own(rows, pack)
            if action == "gather":
                coming[pack] = exchange.begin_visible(own)
            elif action == "reduce":
                returning[pack] = exchange.begin_return_visible(owed.pop(pack))
            else:
                visible = coming.pop(pack)() if pack in coming else own
                saved = (grads[pack], *packs.own((q,), pack), outputs[pack], lses[pack])
                dqs[pack], owed[pack], dweights[pack] = packs.gradients(
                    pack, saved, visible, weight, sinks
                )
                if sinks is not None:
                    dsinks[pack] = sinks_gradient(grads[pack], outputs[pack], lses[pack], sinks)
        # What is still owed is of packs that the lane holds whole. Waiting is no collective.
        drows = [returning[pack]() if pack in returning else owed[pack] for pack in range(count)]
        return (
            None,
            packs.among_all([dqs[pack] for pack in range(count)], q),
            _last_first(dsinks),
            _last_first(dweights),
            *(
                packs.among_all(list(parts), like)
                for parts, like in zip(zip(*drows, strict=True), rows, strict=True)
            ),
        )


def _added(parts: Rows) -> Tensor:
    """The sum, rounded once; a single part as it is."""
    first, *others = parts
    wide = torch.promote_types(first.dtype, torch.float32)
    return reduce(add, others, first.to(wide)).to(first.dtype) if others else first


def _last_first(parts: dict[int, Tensor | None]) -> Tensor | None:
    """The sum over the packs, in one fixed order whatever the order of the steps."""
    given = [part for _, part in sorted(parts.items(), reverse=True) if part is not None]
    return reduce(add, given) if given else None


class Attention(ThreeStepMixer):
    """Grouped-query attention: project, norm, rotate, attend, project.

    With `gate`, q_proj makes for each head its query and then a gate; the head's output is
    multiplied by the gate's sigmoid. With 32 heads, 8 KV heads and 64 dims at width 2048, 5 tokens
    become q (5, 32, 64), k and v (5, 8, 64), and (5, 2048) again.
    """

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "o_proj.weight": RESIDUAL,
        "q_norm.weight": NORM,
        "k_norm.weight": NORM,
    }

    def __init__(self, config: AttentionConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
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
        q_THD, gates = q_TX.unflatten(-1, (-1, size)), list[Tensor]()
        if self.config.gate:
            q_THD, *gates = q_TX.unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
        q_THD, k_TKD = self._normed_rotated(q_THD, k_TKD, tables)
        return (q_THD, k_TKD, v_TKD), tuple(gates)

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        for gate_THD in kept:
            mixed = sigmoid_gate(mixed, gate_THD)
        output_TC: Tensor = self.o_proj(mixed.flatten(-2))
        return output_TC

    def _normed_rotated(
        self, q_THD: Tensor, k_TKD: Tensor, tables: Tables
    ) -> tuple[Tensor, Tensor]:
        """Normed where there are norms, rotated where there is a table; one kernel for all."""
        table = None if self.rope is None else tables[self.rope]
        if self.q_norm is None or self.k_norm is None:
            return (q_THD, k_TKD) if table is None else rotate_both(q_THD, k_TKD, *table)
        if table is None:
            return self.q_norm(q_THD), self.k_norm(k_TKD)
        weights, norm = (self.q_norm.weight, self.k_norm.weight), self.q_norm.norm
        centred = norm.zero_centred
        return norm_rotate_both(q_THD, k_TKD, weights, norm.eps, *table, zero_centred=centred)

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Tensor:
        q_THD, k_TKD, v_TKD = rows
        scale, window = self.config.head_dim**-0.5, self.config.window
        return attend(ctx, self.exchanges, q_THD, k_TKD, v_TKD, scale=scale, window=window)


class MLA(ThreeStepMixer):
    """Multi-head latent attention: project down and up, rotate, attend, project.

    Lanes that share a pack exchange latent_TL: a row is the normed latent and then the rotated key,
    all that one token needs of another. Keys and values of all heads are made from it and kv_up's
    weight, which has for each head the rows of its keys and then of its values. For backward q, the
    lane's latents and the output are kept; keys and values are made again. Those of a long pack are
    made for some heads at a time, so that they take EXPANDED_BYTES (ops/sizes.py).

    Hugging Face's DeepSeek-V3 rotates dims 2i and 2i + 1 together (rope_interleave), `rotate` dims
    i and i + E/2: hf/ reorders the rows of q_proj or q_up and of kv_down that are rotated.

    S rows that the lane's T tokens see; N dims of a key without position, E with one, D = N + E; V
    dims of a value, X = N + V; R the latent's rank, L = R + E. With DeepSeek-V3's H 128, N 128, E
    64, V 128, R 512 a lane needs 576 numbers of another token, not 128·(192 + 128) = 40,960.
    """

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "o_proj.weight": RESIDUAL,
        "q_norm.weight": NORM,
        "kv_norm.weight": NORM,
    }

    def __init__(self, config: MLAConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.rope = config.ropes[0]
        queries = config.heads * config.head_dim
        self.q_proj = self.q_down = self.q_norm = self.q_up = None
        if config.q_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_down = nn.Linear(width, config.q_rank, bias=config.bias)
            self.q_norm = RMSNorm(config.q_rank, norm)
            self.q_up = nn.Linear(config.q_rank, queries, bias=False)
        self.kv_down = nn.Linear(width, config.latent_dim, bias=config.bias)
        self.kv_norm = RMSNorm(config.kv_rank, norm)
        up = config.heads * (config.nope_dim + config.value_dim)
        self.kv_up = nn.Linear(config.kv_rank, up, bias=False)
        self.o_proj = nn.Linear(config.heads * config.value_dim, width, bias=config.bias)

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        cos_TE, sin_TE = tables[self.rope]
        q_in = self.q_proj if self.q_down is None else self.q_down
        assert q_in is not None
        q_TX, kv_TL = projected(x_TC, (q_in, self.kv_down))
        if self.q_norm is not None and self.q_up is not None:
            q_TX = self.q_up(self.q_norm(q_TX))
        q_THD = q_TX.unflatten(-1, (-1, self.config.head_dim))
        q_THD = rotate(q_THD, cos_TE, sin_TE, start=self.config.nope_dim)
        down_TR, key_TE = kv_TL.split([self.config.kv_rank, self.config.rope_dim], dim=1)
        rotated_T1E = rotate(key_TE.unsqueeze(1), cos_TE, sin_TE)
        latent_TL = torch.cat([self.kv_norm(down_TR), rotated_T1E.squeeze(1)], dim=1)
        return (q_THD, latent_TL), ()

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        output_TC: Tensor = self.o_proj(mixed.flatten(-2))
        return output_TC

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Tensor:
        (q, latent_TL), config = rows, self.config
        # −1 heads: under tensor parallelism a rank has only some of them.
        per_head = (-1, config.nope_dim + config.value_dim)
        weight_HXR = whole_weight(self.kv_up).unflatten(0, per_head)
        key_HNR, value_HVR = weight_HXR.split([config.nope_dim, config.value_dim], dim=1)
        if config.form == "absorbed":
            q_THR = torch.einsum("thn,hnr->thr", q[..., : config.nope_dim], key_HNR)
            q = torch.cat([q_THR, q[..., config.nope_dim :]], dim=2)
        outputs = attend_visible(
            tuple(self.exchanges.each(ctx)),
            q,
            (latent_TL,),
            weight=weight_HXR,
            latents=LatentExpansion(config.nope_dim, config.form),
            scale=config.scale,
        )
        mixed = joined(list(outputs))
        if config.form == "absorbed":
            mixed = torch.einsum("thr,hvr->thv", mixed, value_HVR)
        return mixed
