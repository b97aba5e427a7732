"""Sparse attention with a full mask, query by query: the twin of ops/sparse_attention.py.

In and out: as there, differentiable by plain autograd. A query that sees one row, with score 0 and
a sink of 0, takes half of that row: exp(0) / (exp(0) + exp(0)).
"""

import torch
from torch import Tensor

from longshore.ops.row_ranges import RowRanges


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
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    rows_MD = torch.cat([near_RD, entries_ED]).to(dtype)
    visible_TM = torch.cat(
        [_near(ranges, len(near_RD)), _entries(ranges, len(entries_ED), chosen_TK)], 1
    )
    scores_THM = torch.einsum("thd,md->thm", q_THD.to(dtype), rows_MD) * scale
    scores_THM = scores_THM.masked_fill(~visible_TM[:, None], -torch.inf)
    sinks_TH1 = sinks_H.to(dtype).expand(len(q_THD), -1)[:, :, None]
    probs_THM = torch.cat([scores_THM, sinks_TH1], 2).softmax(2)[:, :, :-1]
    out_THD = torch.einsum("thm,md->thd", probs_THM, rows_MD).to(q_THD.dtype)
    if chosen_TK is None or not needs_mass:
        return out_THD, None
    mass_TE = probs_THM.detach().sum(1)[:, len(near_RD) :]
    mass_TK = torch.zeros(chosen_TK.shape, dtype=dtype)
    for t, entries in enumerate(chosen_TK.tolist()):
        for k, entry in enumerate(entries):
            if entry >= 0:
                mass_TK[t, k] = mass_TE[t, entry]
    return out_THD, mass_TK


def _near(ranges: RowRanges, rows: int) -> Tensor:
    row_R = torch.arange(rows)
    return (row_R >= ranges.near_first[:, None]) & (row_R < ranges.near_stop[:, None])


def _entries(ranges: RowRanges, entries: int, chosen_TK: Tensor | None) -> Tensor:
    first, count = ranges.entry_first[:, None], ranges.entry_count[:, None]
    entry_E = torch.arange(entries)
    if chosen_TK is None:
        return (entry_E >= first) & (entry_E < first + count)
    return (chosen_TK[:, :, None] == entry_E).any(1)
