"""Where joined sequences begin and end, the chunks that a scan cuts them into, and kernels' tables.

In: rows of joined sequences. Out: the protocol `Bounds`, which batch.Boundaries satisfies. Two
sequences of 3 and 5 tokens have offsets (0, 3, 8), cu_seqlens [0, 3, 8] as int32 on the device, and
longest 5. An op that gets None instead treats all rows as one sequence. To an op a sequence is any
span of rows: a lane's chunks of a longer sequence are sequences too.

Chunks of Q rows make a scan mostly matrix products. Each sequence is padded to a multiple of Q, so
no chunk holds two sequences. Chunks are ordered by their number within the sequence, longest
sequence first. Sequences a of 3 chunks, b of 1 and c of 2:

    chunks  a0 c0 b0 | a1 c1 | a2        steps (3, 2, 1)

so that a step takes the next slice of the chunks and the first rows of the states.

Tables are made on the host and shared by layers and rounds. The loader makes them ahead
(model/interface.py); one that is missing is made here, at its first use. Boundaries may want
tables of a fixed size, for CUDA graphs: 73 rows in 3 sequences have at most 73 // 64 + 3 = 4 chunks
of 64, so each table lists 4, of which some have no rows.

T rows, S sequences; M chunks of Q rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longshore.ops.sizes import CHUNK_ROWS, CPU_CHUNK_ROWS


class Bounds(Protocol):
    """Sequences of rows, joined without gaps."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def cu_seqlens(self) -> Tensor: ...
    @property
    def longest(self) -> int: ...


def offsets_of(bounds: Bounds | None, rows: int) -> tuple[int, ...]:
    """The offsets on the host, checked against the number of rows."""
    if bounds is None:
        return (0, rows)
    if bounds.offsets[0] != 0 or bounds.offsets[-1] != rows:
        raise ValueError(
            f"the boundaries go from {bounds.offsets[0]} to {bounds.offsets[-1]}, "
            f"but there are {rows} rows; they must cover all rows"
        )
    return bounds.offsets


Made = TypeVar("Made")


def table(bounds: Bounds | None, name: str, make: Callable[[], Made]) -> Made:
    """What `make` returns, called once for these boundaries: layers and rounds share it.

    A name says all that the table depends on besides the boundaries, such as "chunks of 64".
    Tensors of a table, alone or in dataclasses, tuples and dicts, move to a device with the
    boundaries; so a table made on the host by the loader is what `table` finds on the device.
    """
    tables: dict[str, Any] | None = getattr(bounds, "tables", None)
    if tables is None:
        return make()
    if name not in tables:
        # What inference mode makes autograd cannot save, and the next to read it may train.
        with torch.inference_mode(False):
            tables[name] = make()
    return tables[name]


def to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Copies numbers to a device, from page-locked memory so that the host does not wait."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class PreparedScan(Protocol):
    """All of a scan that does not depend on the initial states of its sequences."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """The transition of each sequence (S, H, …), and its final state from 0."""
        ...

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, …), and the final state of each sequence; initial: 0 for None."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The layout of joined sequences in chunks, as the top of this file shows."""

    size: int
    """Q, rows of a chunk."""
    sequences: int
    """S."""
    steps: tuple[int, ...]
    """Chunks of each step, in descending order."""
    places: Tensor
    """int64 (T): the index of each row among the M·Q rows of the chunks."""
    order: Tensor
    """int64 (S): the sequences from the longest down."""
    back: Tensor
    """int64 (S): the inverse of `order`."""

    def cut(self, rows: Tensor) -> Tensor:
        """(T, …) as (M, Q, …), with 0 at padding."""
        chunks = rows.new_zeros(sum(self.steps) * self.size, *rows.shape[1:])
        chunks = chunks.index_copy(0, self.places, rows)
        return chunks.view(sum(self.steps), self.size, *rows.shape[1:])

    def join(self, chunks: Tensor) -> Tensor:
        """(M, Q, …) as (T, …)."""
        return chunks.flatten(0, 1).index_select(0, self.places)


def chunk_rows(device: torch.device) -> int:
    """Rows of a scan's chunk on this device."""
    return CPU_CHUNK_ROWS if device.type == "cpu" else CHUNK_ROWS


def chunks(bounds: Bounds | None, rows: int, size: int | None, device: torch.device) -> Chunks:
    """The chunks of these boundaries, a table of theirs; size: None for the device's default."""
    offsets = offsets_of(bounds, rows)
    size = chunk_rows(device) if size is None else size
    return table(bounds, f"chunks of {size}", lambda: chunks_of(offsets, size, device=device))


def chunks_of(offsets: Sequence[int], size: int, *, device: torch.device) -> Chunks:
    """The chunks of sequences with these offsets."""
    if size < 1:
        raise ValueError(f"a chunk of {size} rows is not possible; give 1 or more")
    starts = np.asarray(offsets[:-1], dtype=np.int64)
    lengths = np.asarray(offsets[1:], dtype=np.int64) - starts
    counts = -(-lengths // size)
    order = np.argsort(-counts, kind="stable")
    back = np.argsort(order, kind="stable")
    most = int(counts.max(initial=0))
    steps = len(counts) - np.searchsorted(np.sort(counts), np.arange(most), side="right")

    sequence = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]
    place = (np.cumsum(steps) - steps)[number] + back[sequence]
    first = starts[sequence] + number * size
    tokens = np.minimum(size, starts[sequence] + lengths[sequence] - first)
    places = np.arange(offsets[-1]) + np.repeat(place * size - first, tokens)
    return Chunks(
        size=size,
        sequences=len(counts),
        steps=tuple(steps.tolist()),
        places=to_device(places, device),
        order=to_device(order, device),
        back=to_device(back, device),
    )


def carry(
    layout: Chunks,
    initial: Tensor,
    step: Callable[..., tuple[Tensor, ...]],
    *,
    parts: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """The final state of each sequence (S, …), then what the steps emitted, (M, …) each.

    step(state, *parts) advances the states of some sequences by one chunk each and returns the
    next states, then what it emits; parts are (M, …).
    """
    state = initial.index_select(0, layout.order)
    ended: list[Tensor] = []
    emitted: list[tuple[Tensor, ...]] = []
    # Splits, not slices: their backward joins all parts once instead of filling M rows for each.
    for each in zip(*(part.split_with_sizes(layout.steps) for part in parts), strict=True):
        state, done = state.split_with_sizes([len(each[0]), len(state) - len(each[0])])
        ended.append(done)
        state, *here = step(state, *each)
        emitted.append(tuple(here))
    if not emitted:
        emitted.append(step(state[:0], *parts)[1:])
    final = torch.cat([state, *reversed(ended)]).index_select(0, layout.back)
    return final, *(torch.cat(each) for each in zip(*emitted, strict=True))


def decays(logs: Tensor) -> Tensor:
    """(…, Q) of log decays as (…, Q, Q): the decay from row j to row i, 0 for j > i.

    Each sum of logs from j + 1 to i is computed on its own: a difference of two long sums would
    lose the small decays after a strong one.
    """
    ones = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device)
    sums = torch.where(ones.tril(-1), logs[..., None], 0.0).cumsum(-2)
    return sums.masked_fill(ones.triu(1), float("-inf")).exp()


def split_decay(logs: Tensor) -> tuple[Tensor, Tensor]:
    """exp(logs) as one + rest, where one is 0 or 1: a decayed state is one·S + rest·S.

    A decay that rounds to 1, or has an error of 1e-8, shows after many chunks. With an update A the
    next state is one·S + (rest·S + A), so that the small terms are added first.
    """
    mostly = logs > -0.5
    return mostly.to(logs.dtype), torch.where(mostly, logs.expm1(), logs.exp())


def first_states(initial: Tensor | None, shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """`initial`, or zeros, of this shape, in float32 or float64 depending on `like`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if initial is None:
        return like.new_zeros(shape, dtype=dtype)
    if initial.shape != shape:
        raise ValueError(f"initial states have shape {tuple(initial.shape)}; they must be {shape}")
    return initial.to(dtype)


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
    """Sequences of 3 and 70 rows have the chunks (first row, rows) (0, 3), (3, 64), (67, 6)."""
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
    """most: chunks of 0 rows fill the table up to this many."""
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
    """Spans of 0, 3 and 70 rows have cu_seqlens 0 3 73 and the chunks (0, 0), (1, 0), (1, 1)."""
    offsets = offsets_of(bounds, rows)
    most = most_chunks(bounds, DELTA_ROWS)
    name = "delta rule: spans with rows"
    return table(bounds, name, lambda: _filled_spans(offsets, device, most))


def _filled_spans(offsets: tuple[int, ...], device: torch.device, most: int | None) -> FilledSpans:
    """most: where sizes are fixed, spans without rows stay, and this many chunks are listed."""
    joints = np.asarray(offsets, dtype=np.int64)
    lengths = joints[1:] - joints[:-1]
    kept = np.flatnonzero(lengths) if most is None else np.arange(len(lengths))
    counts = -(-lengths[kept] // DELTA_ROWS)
    span = np.repeat(np.arange(len(kept)), counts)
    number = np.arange(len(span)) - (np.cumsum(counts) - counts)[span]
    # A chunk past the end of the first span has no rows.
    empty = (0, int(counts[0]) if len(counts) else 0)
    chunks = _filled(np.stack([span, number], axis=1), empty, most)
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
