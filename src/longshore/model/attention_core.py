"""The core of attention: a lane's queries see the rows of their sequences, wherever those are.

In: the context, the exchanges, queries (T, H, D), keys and values (T, K, D) of the lane. Out:
(T, H, D). model/attention.py says how a pack that lanes share is served. `attend_visible` is the
way by gather, for rows of which keys and values are made later, too (MLA). While one pack is
attended to the next one travels; model/interface.py has the order.

With 2 lanes and a sequence of 8 tokens, lane 0 has t0 t1 t6 t7: its chunk t0 t1 sees itself, its
chunk t6 t7 all 8, of which 4 come from lane 1. The gradients of these 4 go back to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.batch import SeqContext
from longshore.choices import AttentionKind
from longshore.model.interface import (
    Exchange,
    Exchanges,
    HereAlready,
    PendingRows,
    Rows,
    backward_steps,
    forward_steps,
    joined,
)
from longshore.ops.attention import (
    attention,
    attention_backward,
    attention_forward,
    sinks_gradient,
)


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


class KeysValues(Protocol):
    """How keys and values come from the rows that lanes exchange."""

    def head_groups(self, rows: tuple[Tensor, ...], weight: Tensor | None) -> list[slice]:
        """The heads whose keys and values are made together, group by group."""
        ...

    def make(self, rows: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor, Tensor]: ...

    def gradients(
        self, dk: Tensor, dv: Tensor, rows: tuple[Tensor, ...], weight: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Of the rows and of the weight, from those of keys and values."""
        ...


ALL_HEADS = [slice(None)]

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def _some(x: MaybeTensor, heads: slice, dim: int = 0) -> MaybeTensor:
    """x of these heads; of all heads as it is."""
    if x is None or heads == ALL_HEADS[0]:
        return x
    return x[heads] if dim == 0 else x[:, heads]


class AsTheyAre:
    """The rows are keys and values."""

    def head_groups(self, rows: tuple[Tensor, ...], weight: Tensor | None) -> list[slice]:
        return ALL_HEADS

    def make(self, rows: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = rows
        return k, v

    def gradients(
        self, dk: Tensor, dv: Tensor, rows: tuple[Tensor, ...], weight: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        return (dk, dv), None


def attend_visible(
    exchanges: tuple[Exchange, ...],
    q_THD: Tensor,
    rows: tuple[Tensor, ...],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weight: Tensor | None = None,
    keys_values: KeysValues | None = None,
) -> tuple[Tensor, ...]:
    """For each of these packs (its rows, H, V): the lane's queries against all rows they may see.

    q_THD and rows are of all tokens of the lane, whether in these packs or not; rows: what others
    need of them to make keys and values. For backward only the lane's own rows are kept, with q and
    the outputs; the others' are fetched again. softcap, sinks: see ops/attention.py.
    """
    spec = _Spec(exchanges, keys_values or AsTheyAre(), scale, window, softcap)
    outputs: tuple[Tensor, ...] = _AttendVisible.apply(spec, q_THD, sinks, weight, *rows)  # type: ignore[no-untyped-call]
    return outputs


@dataclass(frozen=True, slots=True, eq=False)
class _Spec:
    exchanges: tuple[Exchange, ...]
    """Of the packs."""
    keys_values: KeysValues
    """How keys and values are made of the rows."""
    scale: float
    """Of the scores."""
    window: int | None
    """How many tokens one sees, itself included; None for all before it."""
    softcap: float | None
    """See ops/attention.py."""

    @property
    def cp_sizes(self) -> list[int]:
        return [exchange.size for exchange in self.exchanges]

    def options(self, place: int) -> dict[str, Any]:
        return {
            "bounds": self.exchanges[place].bounds,
            "key_bounds": self.exchanges[place].visible_bounds,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
        }

    def attend(
        self,
        place: int,
        q: Tensor,
        rows: tuple[Tensor, ...],
        weight: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a pack, from the rows that it sees."""
        outputs, lses = [], []
        for heads in self.keys_values.head_groups(rows, weight):
            k, v = self.keys_values.make(rows, _some(weight, heads))
            output, lse = attention_forward(
                _some(q, heads, 1), k, v, sinks=_some(sinks, heads), **self.options(place)
            )
            outputs.append(output)
            lses.append(lse)
        return joined(outputs, dim=1), joined(lses)

    def gradients(
        self,
        place: int,
        saved: tuple[Tensor, ...],
        rows: tuple[Tensor, ...],
        weight: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Of q, of the rows and of the weight. saved: the output's gradient, q, output and lse."""
        grad, q, output, lse = saved
        dqs, dweights, groups = [], [], []
        for heads in self.keys_values.head_groups(rows, weight):
            own = _some(weight, heads)
            k, v = self.keys_values.make(rows, own)
            dq, dk, dv = attention_backward(
                _some(grad, heads, 1),
                _some(q, heads, 1),
                k,
                v,
                _some(output, heads, 1),
                _some(lse, heads),
                sinks=_some(sinks, heads),
                **self.options(place),
            )
            dqs.append(dq)
            drows, dweight = self.keys_values.gradients(dk, dv, rows, own)
            groups.append(drows)
            if dweight is not None:
                dweights.append(dweight)
        drows = tuple(_added(parts) for parts in zip(*groups, strict=True))
        return joined(dqs, dim=1), drows, joined(dweights) if dweights else None

    def own(self, rows: Sequence[Tensor], place: int) -> tuple[Tensor, ...]:
        """The rows of one pack; of the only one there is as they are."""
        inside = self.exchanges[place].pack.rows
        if inside.start == 0 and inside.stop == rows[0].shape[0]:
            return tuple(rows)
        return tuple(part[inside] for part in rows)

    def placed(self, parts: list[Tensor], like: Tensor) -> Tensor:
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
        spec: _Spec,
        q: Tensor,
        sinks: Tensor | None,
        weight: Tensor | None,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        coming: dict[int, PendingRows] = {}
        results: dict[int, tuple[Tensor, Tensor]] = {}
        for action, place in forward_steps(spec.cp_sizes):
            own = spec.own(rows, place)
            if action == "gather":
                coming[place] = spec.exchanges[place].begin_visible(own)
                continue
            visible = coming.pop(place, HereAlready(own)).wait()
            (q_pack,) = spec.own((q,), place)
            results[place] = spec.attend(place, q_pack, visible, weight, sinks)
        outputs, lses = zip(*(results[place] for place in range(len(results))), strict=True)
        ctx.spec = spec
        ctx.save_for_backward(q, sinks, weight, *rows, *outputs, *lses)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        spec: _Spec = ctx.spec
        q, sinks, weight, *others = ctx.saved_tensors
        packs = len(spec.exchanges)
        rows, outputs, lses = others[: -2 * packs], others[-2 * packs : -packs], others[-packs:]
        coming: dict[int, PendingRows] = {}
        owed: dict[int, tuple[Tensor, ...]] = {}
        returning: dict[int, PendingRows] = {}
        dqs: dict[int, Tensor] = {}
        dweights: dict[int, Tensor] = {}
        dsinks: dict[int, Tensor] = {}
        for action, place in backward_steps(spec.cp_sizes):
            exchange, own = spec.exchanges[place], spec.own(rows, place)
            if action == "gather":
                coming[place] = exchange.begin_visible(own)
            elif action == "reduce":
                returning[place] = exchange.begin_return_visible(owed.pop(place))
            else:
                visible = coming.pop(place, HereAlready(own)).wait()
                (q_pack,) = spec.own((q,), place)
                saved = (grads[place], q_pack, outputs[place], lses[place])
                dqs[place], owed[place], dweight = spec.gradients(
                    place, saved, visible, weight, sinks
                )
                if dweight is not None:
                    dweights[place] = dweight
                if sinks is not None:
                    dsinks[place] = sinks_gradient(grads[place], outputs[place], lses[place], sinks)
        # What is still owed is of packs that the lane holds whole. Waiting is no collective.
        drows = [
            returning[place].wait() if place in returning else owed[place] for place in range(packs)
        ]
        return (
            None,
            spec.placed([dqs[place] for place in range(packs)], q),
            _last_first(dsinks),
            _last_first(dweights),
            *(
                spec.placed(list(parts), like)
                for parts, like in zip(zip(*drows, strict=True), rows, strict=True)
            ),
        )


def _added(parts: tuple[Tensor, ...]) -> Tensor:
    """The sum, rounded once; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def _last_first(parts: dict[int, Tensor]) -> Tensor | None:
    """The sum over the packs, in one fixed order whatever the order of the steps."""
    total: Tensor | None = None
    for place in sorted(parts, reverse=True):
        total = parts[place] if total is None else total + parts[place]
    return total
