"""Pooled groups of rows, entry by entry: the twin of ops/pooling.py.

In and out: as there, differentiable by plain autograd. Rows 2 and 6 with equal gates give 4.
"""

import torch
from torch import Tensor


def pooled(
    values_RC: Tensor, gates_RC: Tensor, bias_GC: Tensor, rows_EG: Tensor, *, overlap: bool = False
) -> Tensor:
    dtype = torch.promote_types(values_RC.dtype, torch.float32)
    width = values_RC.shape[1] // 2 if overlap else values_RC.shape[1]
    entries = [values_RC.new_zeros(0, width)]
    for rows in rows_EG.tolist():
        values, scores = [], []
        for slot, row in enumerate(rows):
            if row < 0:
                continue
            late, place = divmod(slot, len(bias_GC)) if overlap else (0, slot)
            channels = slice(late * width, late * width + width)
            values.append(values_RC[row, channels].to(dtype))
            scores.append(gates_RC[row, channels].to(dtype) + bias_GC[place, channels].to(dtype))
        if values:
            entry_C = (torch.stack(scores).softmax(0) * torch.stack(values)).sum(0)
        else:
            entry_C = torch.zeros(width, dtype=dtype)
        entries.append(entry_C[None].to(values_RC.dtype))
    # All inputs are used, so that each gets a gradient.
    unused = 0.0 * (values_RC.sum() + gates_RC.sum() + bias_GC.sum())
    return torch.cat(entries) + unused
