"""Tables of boundaries that kernels read, made on the host; they need neither Triton nor fla.

In: boundaries, rows, the device of the rows. Out: tables that layers and rounds share. The loader
makes them ahead (model/host_tables.py); one that is missing is made here, at its first use.

The chunks of Mamba2's scan: sequences of 3 and 70 rows have the chunks (first row, rows) (0, 3),
(3, 64), (67, 6). The spans with rows of the delta rule: of spans of 0, 3 and 70 rows the last two,
with cu_seqlens 0 3 73 and, in chunks of 64 rows, the chunks (0, 0), (1, 0), (1, 1).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of, table, to_device

SSD_ROWS = 64
"""Rows of a chunk of the scan's kernels."""
DELTA_ROWS = 64
"""Rows of a chunk of flash-linear-attention's kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Where chunks and sequences lie; int32, on the device."""

    chunks: Tensor
    """(M, 2): the first row of each chunk, and its number of rows."""
    sequences: Tensor
    """(S, 5), longest first: its index, first chunk, chunks, first row and rows."""
    lengths: Tensor
    """(S): rows of each sequence, in their own order."""


def chunk_table(bounds: Bounds | None, rows: int, device: torch.device) -> ChunkTable:
    offsets = offsets_of(bounds, rows)
    return table(bounds, f"ssd chunks of {SSD_ROWS}", lambda: _chunk_table(offsets, device))


def _chunk_table(offsets: tuple[int, ...], device: torch.device) -> ChunkTable:
    starts = np.asarray(offsets[:-1], dtype=np.int32)
    lengths = np.asarray(offsets[1:], dtype=np.int32) - starts
    counts = -(-lengths // SSD_ROWS)
    first_chunk = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(counts)), counts)
    skipped = (np.arange(len(owner)) - first_chunk[owner]) * SSD_ROWS
    rows = np.minimum(SSD_ROWS, lengths[owner] - skipped)
    columns = [np.arange(len(counts)), first_chunk, counts, starts, lengths]
    sequences = np.stack(columns, axis=1)[np.argsort(-lengths, kind="stable")]
    return ChunkTable(
        chunks=to_device(np.stack([starts[owner] + skipped, rows], 1).astype(np.int32), device),
        sequences=to_device(sequences.astype(np.int32), device),
        lengths=to_device(lengths, device),
    )


@dataclass(frozen=True, slots=True, eq=False)
class FilledSpans:
    """The spans that have rows, as flash-linear-attention's kernels want them."""

    cu_seqlens: Tensor
    """int32 (N + 1)."""
    chunks: Tensor
    """int32 (chunks, 2): the span of each chunk, and its number there."""
    kept: Tensor
    """int64 (N): their indices among all spans."""


def filled_spans(bounds: Bounds | None, rows: int, device: torch.device) -> FilledSpans:
    offsets = offsets_of(bounds, rows)
    return table(bounds, "delta rule: spans with rows", lambda: _filled_spans(offsets, device))


def _filled_spans(offsets: tuple[int, ...], device: torch.device) -> FilledSpans:
    joints = np.asarray(offsets, dtype=np.int64)
    lengths = joints[1:] - joints[:-1]
    kept = np.flatnonzero(lengths)
    counts = -(-lengths[kept] // DELTA_ROWS)
    span = np.repeat(np.arange(len(kept)), counts)
    number = np.arange(len(span)) - (np.cumsum(counts) - counts)[span]
    ends = np.concatenate([[0], np.cumsum(lengths[kept])])
    return FilledSpans(
        cu_seqlens=to_device(ends.astype(np.int32), device),
        chunks=to_device(np.stack([span, number], axis=1).astype(np.int32), device),
        kept=to_device(kept, device),
    )
