"""Attention over a window of rows and compressed entries, one head of keys for all queries.

In: queries (T, H, D), rows (R, D) and entries (E, D) that are keys and values at once, a logit for
each head that counts in the denominator alone (sink), and the ranges of what each query sees
(ops/row_ranges.py). Out: (T, H, D), and if wanted the attention on each chosen entry, summed over
the heads. Differentiable in q, near, entries and sinks.

A query with scores 0 for two near rows 1 and 3 and one entry 4, and a sink of 0, gives
(1 + 3 + 4) / 4 = 2, and a mass of ¼ on the entry. With the entry not chosen it gives 4/3.

T queries, H heads, D width of a head, R rows, E entries, K chosen entries of a query. No T × R or
T × E matrix exists at any time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.backends import pick
from longshore.ops.row_ranges import RowRanges
from longshore.ops.sparse_attention_blocks import Attended, VisibleKeys, backward, forward


def sparse_attention(
    q_THD: Tensor,
    near_RD: Tensor,
    entries_ED: Tensor,
    sinks_H: Tensor,
    *,
    ranges: RowRanges,
    scale: float,
    chosen_TK: Tensor | None = None,
    needs_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output in the dtype of q; mass_TK in float32 at least, detached, None unless needed.

    chosen: int32, as `indexer.choose` returns it: entries of the query's range, then −1 for none;
    None: a query sees all entries of its range. mass is only there with chosen entries.
    """
    _check(q_THD, near_RD, entries_ED, sinks_H, chosen_TK)
    ranges.check(len(q_THD), len(near_RD), len(entries_ED))
    out: tuple[Tensor, Tensor | None] = _SparseAttention.apply(  # type: ignore[no-untyped-call]
        q_THD, near_RD, entries_ED, sinks_H, chosen_TK, ranges, scale, needs_mass
    )
    return out


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        near: Tensor,
        entries: Tensor,
        sinks: Tensor,
        chosen: Tensor | None,
        ranges: RowRanges,
        scale: float,
        needs_mass: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.ranges, ctx.scale = ranges, scale
        kernels = ctx.kernels = pick("sparse attention", q, near, entries)
        if kernels is not None:
            options = {"scale": scale, "needs_mass": needs_mass}
            out, lse, mass = kernels.forward(q, sinks, near, entries, chosen, ranges, **options)
            ctx.save_for_backward(q, near, entries, sinks, chosen, out, lse, None)
            if mass is not None:
                ctx.mark_non_differentiable(mass)
            return out, mass
        keys = VisibleKeys(near, entries, ranges, chosen)
        done = forward(q, sinks, keys, scale=scale, needs_mass=needs_mass)
        ctx.save_for_backward(q, near, entries, sinks, chosen, done.out, done.top, done.total)
        if done.mass is not None:
            ctx.mark_non_differentiable(done.mass)
        return done.out, done.mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _mass: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, near, entries, sinks, chosen, out, top, total = ctx.saved_tensors
        if ctx.kernels is not None:
            grads = ctx.kernels.backward(
                grad, q, sinks, near, entries, chosen, ctx.ranges, out, top, scale=ctx.scale
            )
            return *grads, None, None, None, None
        keys = VisibleKeys(near, entries, ctx.ranges, chosen)
        done = Attended(out, top, total, None)
        return *backward(grad, q, sinks, keys, done, scale=ctx.scale), None, None, None, None


def _check(q: Tensor, near: Tensor, entries: Tensor, sinks: Tensor, chosen: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, near {tuple(near.shape)}, entries {tuple(entries.shape)}"
    if not (q.dim() == 3 and near.dim() == entries.dim() == 2):
        raise ValueError(
            f"the shapes are {shapes}; q must be (rows, heads, width), the others (rows, width)"
        )
    if not q.shape[2] == near.shape[1] == entries.shape[1]:
        raise ValueError(f"the shapes are {shapes}; all must have the same width")
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks are {tuple(sinks.shape)}; there are {q.shape[1]} heads")
    if not q.dtype == near.dtype == entries.dtype:
        raise ValueError(
            f"q is {q.dtype}, near {near.dtype}, entries {entries.dtype}; give one dtype"
        )
    if chosen is not None and (chosen.dim() != 2 or len(chosen) != len(q)):
        raise ValueError(
            f"chosen is {tuple(chosen.shape)}; it must be (rows, entries) with {len(q)} rows"
        )
