"""Tables of a pack that compressed sparse attention reads: who sees what, what an entry pools.

In: a pack, a layer's window and ratio, the device. Out: EntryTables, shared by all layers with the
same window and ratio. The loader makes them on the host (model/host_tables.py); what is missing is
made here at its first use. The arithmetic is plan/entries.py's.

A pack of sequences of 3 and 5 tokens, window 2, ratio 4 with overlapping groups: one entry at
position 0, made of rows −1 −1 −1 −1 3 4 5 6, which the last two rows see.

A lane that shares a pack has two chunks of each sequence. It fetches the rows before each (a halo),
pools the groups that end in its chunks, and gets the entries of all lanes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longshore.arch.rope import RopeConfig
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.batch import PackContext
from longshore.model.rope import rope_at
from longshore.ops.boundaries import table, to_device
from longshore.ops.row_ranges import RowRanges, row_ranges
from longshore.plan.entries import (
    Spans,
    chunk_spans,
    gathered_entries,
    halo_rows,
    near_rows,
    owned_entries,
    pooled_rows,
    rows_after_halos,
    visible_entries,
    whole_spans,
)


@dataclass(frozen=True, slots=True)
class EntryKind:
    """What the tables of a layer depend on besides the pack."""

    window: int
    """Tokens that a token sees."""
    ratio: int
    """Tokens of a group; 0 for no entries."""
    overlap: bool
    """Whether an entry pools the group before its own, too."""

    @staticmethod
    def of(config: SparseAttentionConfig) -> "EntryKind":
        return EntryKind(config.window, config.ratio, config.index is not None)

    def __str__(self) -> str:
        overlap = ", overlapping" if self.overlap else ""
        return f"entries of {self.ratio}{overlap}, window {self.window}"


@dataclass(frozen=True, slots=True, eq=False)
class EntryTables:
    """On the device."""

    ranges: RowRanges
    """What each row sees, of the lane's rows after halos and of all entries."""
    rows: Tensor
    """int32 (E, G): the rows that each entry of the lane's pools, −1 for none."""
    positions: Tensor
    """int32 (E): of the first token of each entry's own group."""
    shared: "SharedEntries | None" = None
    """Where lanes share the pack."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedEntries:
    """How a lane reaches rows and entries of others."""

    halo: int
    """Rows that are fetched before each chunk."""
    after_halos: Tensor
    """int32: of all halos and then the lane's rows, each chunk after its halo."""
    order: Tensor
    """int32: where each entry of the pack is among those that all lanes sent."""
    most: int
    """To so many entries each lane's are padded."""


def entry_tables(pack: PackContext, kind: EntryKind, device: torch.device) -> EntryTables:
    return table(pack.padded, str(kind), lambda: _entry_tables(pack, kind, device))


def entry_rope(
    pack: PackContext, kind: EntryKind, rope: RopeConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of each entry, (E, R), float32 or more."""
    positions = entry_tables(pack, kind, device).positions
    wide = torch.promote_types(dtype, torch.float32)
    name = f"{kind}, rotated by {rope} in {wide}"
    return table(pack.padded, name, lambda: rope_at(rope, positions, wide))


def _entry_tables(pack: PackContext, kind: EntryKind, device: torch.device) -> EntryTables:
    spans, shared = whole_spans(pack.padded.offsets, pack.lengths, kind.ratio), None
    offsets = pack.padded.offsets
    if pack.zigzag is not None:
        spans, shared = _shared(pack, kind, device)
        offsets = pack.zigzag.chunks.offsets
    near, entries = near_rows(spans, kind.window), visible_entries(spans, kind.ratio)
    numbers, _ = owned_entries(spans, kind.ratio)
    return EntryTables(
        ranges=row_ranges(*near, *entries, offsets=offsets, device=device),
        rows=to_device(pooled_rows(spans, kind.ratio, overlap=kind.overlap), device),
        positions=to_device((numbers * kind.ratio).astype("int32"), device),
        shared=shared,
    )


def _shared(
    pack: PackContext, kind: EntryKind, device: torch.device
) -> tuple[Spans, SharedEntries]:
    joints = np.asarray(pack.padded.offsets, dtype=np.int64)
    halo = halo_rows(kind.window, kind.ratio, overlap=kind.overlap)
    lanes = [
        chunk_spans(
            joints[1:] - joints[:-1],
            kind.ratio,
            cp_rank=rank,
            cp_size=pack.group.cp_size,
            halo=halo,
        )
        for rank in range(pack.group.cp_size)
    ]
    own = lanes[pack.group.cp_rank]
    order, most = gathered_entries(lanes, kind.ratio)
    after = rows_after_halos(own, halo)
    return own, SharedEntries(
        halo=halo,
        after_halos=to_device(after.astype(np.int32), device),
        order=to_device(order.astype(np.int32), device),
        most=most,
    )
