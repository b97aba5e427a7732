"""Tables of boundaries that kernels read, made on the host; they need neither Triton nor fla.

In: boundaries, rows, the device of the rows. Out: tables that layers and rounds share. The loader
makes them ahead (model/host_tables.py); one that is missing is made here, at its first use.

The chunks of Mamba2's scan: sequences of 3 and 70 rows have the chunks (first row, rows) (0, 3),
(3, 64), (67, 6). The spans with rows of the delta rule: of spans of 0, 3 and 70 rows the last two,
with cu_seqlens 0 3 73 and, in chunks of 64 rows, the chunks (0, 0), (1, 0), (1, 1).

Boundaries may want tables of a fixed size, for CUDA graphs: 73 rows in 3 sequences have at most
73 // 64 + 3 = 4 chunks, so each table lists 4, of which some have no rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of, table, to_device

SSD_ROWS = 64
"""Rows of a chunk of the scan's kernels."""
DELTA_ROWS = 64
"""Rows of a chunk of flash-linear-attention's kernels."""
CONV_SPANS, CONV_SINCE = "conv: span of each row", "conv: rows since the start"


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
    most = most_chunks(bounds, SSD_ROWS)
    return table(bounds, f"ssd chunks of {SSD_ROWS}", lambda: _chunk_table(offsets, device, most))


def most_chunks(bounds: Bounds | None, size: int) -> int | None:
    """How many chunks a table is padded to where its size is fixed; None where it is not."""
    if not getattr(bounds, "fixed", False):
        return None
    assert bounds is not None
    return bounds.offsets[-1] // size + len(bounds.offsets) - 1


def _chunk_table(offsets: tuple[int, ...], device: torch.device, most: int | None) -> ChunkTable:
    """most: chunks of 0 rows fill the table up to so many."""
    starts = np.asarray(offsets[:-1], dtype=np.int32)
    lengths = np.asarray(offsets[1:], dtype=np.int32) - starts
    counts = -(-lengths // SSD_ROWS)
    first_chunk = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(counts)), counts)
    skipped = (np.arange(len(owner)) - first_chunk[owner]) * SSD_ROWS
    rows = np.minimum(SSD_ROWS, lengths[owner] - skipped)
    columns = [np.arange(len(counts)), first_chunk, counts, starts, lengths]
    sequences = np.stack(columns, axis=1)[np.argsort(-lengths, kind="stable")]
    chunks = np.stack([starts[owner] + skipped, rows], 1)
    return ChunkTable(
        chunks=to_device(_filled(chunks, (0, 0), most).astype(np.int32), device),
        sequences=to_device(sequences.astype(np.int32), device),
        lengths=to_device(lengths, device),
    )


def _filled(entries: NDArray[Any], empty: tuple[int, int], most: int | None) -> NDArray[Any]:
    """The entries (M, 2) with empty ones after them, `most` in all; None: as they are."""
    if most is None:
        return entries
    return np.concatenate([entries, np.tile(empty, (most - len(entries), 1))])


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
    most = most_chunks(bounds, DELTA_ROWS)
    name = "delta rule: spans with rows"
    return table(bounds, name, lambda: _filled_spans(offsets, device, most))


def _filled_spans(offsets: tuple[int, ...], device: torch.device, most: int | None) -> FilledSpans:
    """most: where sizes are fixed, spans without rows stay, and so many chunks are listed.

    A chunk past the end of the first span has no rows.
    """
    joints = np.asarray(offsets, dtype=np.int64)
    lengths = joints[1:] - joints[:-1]
    kept = np.flatnonzero(lengths) if most is None else np.arange(len(lengths))
    counts = -(-lengths[kept] // DELTA_ROWS)
    span = np.repeat(np.arange(len(kept)), counts)
    number = np.arange(len(span)) - (np.cumsum(counts) - counts)[span]
    chunks = _filled(
        np.stack([span, number], axis=1), (0, int(counts[0]) if len(counts) else 0), most
    )
    ends = np.concatenate([[0], np.cumsum(lengths[kept])])
    return FilledSpans(
        cu_seqlens=to_device(ends.astype(np.int32), device),
        chunks=to_device(chunks.astype(np.int32), device),
        kept=to_device(kept, device),
    )


def conv_spans(bounds: Bounds, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 (T): the span of each row, and its rows since the start of that span."""

    def spans() -> Tensor:
        return to_device(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), device)

    def rows_since() -> Tensor:
        since = np.arange(joints[-1]) - np.repeat(joints[:-1], lengths)
        return to_device(since.astype(np.int32), device)

    joints = np.asarray(bounds.offsets, dtype=np.int64)
    lengths = joints[1:] - joints[:-1]
    return table(bounds, CONV_SPANS, spans), table(bounds, CONV_SINCE, rows_since)
