"""Groups of rows pooled into entries, by a softmax over the rows of a group for each channel.

In: values and gates (R, C), a bias (G, C) for the places in a group, and the rows of each group.
Out: entries. Overlapping groups: the first half of the slots reads the first half of the channels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longshore.ops.boundaries import to_device
from longshore.ops.reference import pooling as reference


def pooled(
    values_RC: Tensor, gates_RC: Tensor, bias_GC: Tensor, rows_EG: Tensor, *, overlap: bool = False
) -> Tensor:
    """(E, C), or (E, C/2) with overlap, where bias is (G/2, C)."""
    return reference.pooled(values_RC, gates_RC, bias_GC, rows_EG, overlap=overlap)


def group_rows(
    offsets: Sequence[int], *, ratio: int, overlap: bool, device: torch.device
) -> Tensor:
    """int32 (E, G): the rows of each full group of `ratio` rows of whole sequences.

    With overlap a group's own rows come after those of the previous group, −1 for the first of a
    sequence. A sequence of 5 rows in groups of 2: [0 1] [2 3], with overlap [−1 −1 0 1] [0 1 2 3].
    """
    starts = np.asarray(offsets[:-1], dtype=np.int64)
    counts = (np.asarray(offsets[1:], dtype=np.int64) - starts) // ratio
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(starts, counts) + number * ratio
    rows = first[:, None] + np.arange(ratio)
    if overlap:
        before = np.where(number[:, None] > 0, rows - ratio, -1)
        rows = np.concatenate([before, rows], 1)
    return to_device(rows.astype(np.int32), device)
