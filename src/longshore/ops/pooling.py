"""Groups of rows pooled into entries: a softmax over the rows of a group, for each channel.

In: values and gates (R, C), a bias (G, C) for the places in a group, and the rows of each group.
Out: entries (E, C), the weighted sums. Rows 2 and 6 with gates 0 and log 3 give ¼·2 + ¾·6 = 5.

Overlapping groups have rows in G = 2r slots: the first r are the previous group's, of which the
first half of the channels counts, the last r its own, of which the second half counts. With r = 1
and rows (1, 2), (3, 4), equal gates give the entries 2 (it has no previous group) and
(1 + 4) / 2 = 2.5.

R rows, C channels, E entries, G slots of a group.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.indexed_rows import add_rows_, sums_for, take_rows

MOST_POOLED = 1 << 21
"""Numbers pooled at a time, unless one group already has more."""


def pooled(
    values_RC: Tensor, gates_RC: Tensor, bias_GC: Tensor, rows_EG: Tensor, *, overlap: bool = False
) -> Tensor:
    """(E, C) in the dtype of values; with overlap (E, C/2), where bias is (r, C).

    rows: int32, the rows of each group, −1 for none, which has weight 0. A group without rows gives
    0. Computed in float32 at least; differentiable in values, gates and bias.
    """
    _check(values_RC, gates_RC, bias_GC, rows_EG, overlap)
    if overlap:
        # A row of 2D channels is two rows of D: slot by slot the first or the second of them.
        late_G = torch.arange(rows_EG.shape[1], device=rows_EG.device) >= len(bias_GC)
        rows_EG = torch.where(rows_EG < 0, -1, 2 * rows_EG + late_G)
        bias_GC = torch.cat(bias_GC.chunk(2, 1))
        values_RC, gates_RC = (
            x.reshape(2 * len(x), x.shape[1] // 2) for x in (values_RC, gates_RC)
        )
    out: Tensor = _Pooled.apply(  # type: ignore[no-untyped-call]
        values_RC, gates_RC, bias_GC, rows_EG
    )
    return out


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gates: Tensor, bias: Tensor, rows: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(values, gates, bias, rows)
        dtype = torch.promote_types(values.dtype, torch.float32)
        out_EC = values.new_empty(len(rows), values.shape[1])
        for block in _blocks(rows, values.shape[1]):
            weights_eGC = _weights(gates, bias, rows[block], dtype)
            values_eGC = take_rows(values, rows[block], dtype)
            out_EC[block] = weights_eGC.mul_(values_eGC).sum(1)
        return out_EC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        values, gates, bias, rows = ctx.saved_tensors
        dtype = torch.promote_types(values.dtype, torch.float32)
        dvalues, dgates = sums_for(values, dtype), sums_for(gates, dtype)
        dbias = torch.zeros_like(bias, dtype=dtype)
        for block in _blocks(rows, values.shape[1]):
            weights_eGC = _weights(gates, bias, rows[block], dtype)
            values_eGC = take_rows(values, rows[block], dtype)
            grad_e1C = grad[block, None].to(dtype)
            mean_e1C = (weights_eGC * values_eGC).sum(1, keepdim=True)
            add_rows_(dvalues, rows[block], weights_eGC * grad_e1C)
            dscores_eGC = values_eGC.sub_(mean_e1C).mul_(weights_eGC).mul_(grad_e1C)
            add_rows_(dgates, rows[block], dscores_eGC)
            dbias += dscores_eGC.sum(0)
        return (
            dvalues[:-1].to(values.dtype),
            dgates[:-1].to(gates.dtype),
            dbias.to(bias.dtype),
            None,
        )


def _blocks(rows_EG: Tensor, width: int) -> Iterator[slice]:
    entries, slots = rows_EG.shape
    step = max(1, MOST_POOLED // max(1, slots * width))
    for start in range(0, entries, step):
        yield slice(start, start + step)


def _weights(gates: Tensor, bias: Tensor, rows_eG: Tensor, dtype: torch.dtype) -> Tensor:
    """(e, G, C), 0 where there is no row."""
    none_eG1 = (rows_eG < 0)[:, :, None]
    scores_eGC = take_rows(gates, rows_eG, dtype).add_(bias)
    # The softmax over a group without rows is NaN.
    return scores_eGC.masked_fill_(none_eG1, -torch.inf).softmax(1).masked_fill_(none_eG1, 0.0)


def _check(values: Tensor, gates: Tensor, bias: Tensor, rows: Tensor, overlap: bool) -> None:
    parts = 2 if overlap else 1
    if values.shape != gates.shape or values.dim() != 2:
        raise ValueError(
            f"values are {tuple(values.shape)} and gates {tuple(gates.shape)}; both must be "
            "(rows, channels)"
        )
    if bias.dim() != 2 or rows.dim() != 2 or bias.shape != (rows.shape[1] / parts, values.shape[1]):
        raise ValueError(
            f"bias is {tuple(bias.shape)}, and groups are {tuple(rows.shape)} of rows with "
            f"{values.shape[1]} channels; with overlap={overlap} bias must have a row for each "
            + ("two slots" if overlap else "slot")
        )
    if overlap and values.shape[1] % 2:
        raise ValueError(
            f"there are {values.shape[1]} channels; overlapping groups need two halves"
        )
