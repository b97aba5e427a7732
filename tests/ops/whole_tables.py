"""The tables of sparse attention for whole sequences on one lane, as tests of its ops want them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longshore.ops.boundaries import to_device
from longshore.ops.sparse_attention import RowRanges, row_ranges


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


def causal_ranges(
    offsets: Sequence[int], *, window: int, ratio: int, device: torch.device
) -> RowRanges:
    """The ranges of whole sequences, whose entries follow each other sequence by sequence."""
    starts = np.asarray(offsets[:-1], dtype=np.int64)
    lengths = np.asarray(offsets[1:], dtype=np.int64) - starts
    start = np.repeat(starts, lengths)
    row = np.arange(offsets[-1])
    position = row - start
    entries = lengths // ratio if ratio else np.zeros_like(lengths)
    return row_ranges(
        np.maximum(start, row - window + 1),
        row + 1,
        np.repeat(np.cumsum(entries) - entries, lengths),
        (position + 1) // ratio if ratio else np.zeros_like(row),
        offsets=offsets,
        device=device,
    )
