"""Tables that a decoder's ops need of each pack's boundaries, made on the host by the loader.

In: a decoder's config, how lanes share a scan, the device it runs on. Out: functions that the
packing step calls with each pack (data/steps.py: Packing.tables). A table moves to the device with
its boundaries, where the op looks for it under the same name; one that is missing there is made on
the spot, once for each micro-batch. So what a maker leaves out costs time, and nothing else.

    table_makers(preset("tiny-llama"), scan="auto", device=device)     ()
    table_makers(preset("tiny-deepseek-v4"), …)                        one for each window and ratio

With a layer of Mamba2 on a GPU a pack of sequences of 100 and 70 tokens gets "ssd chunks of 64",
which the kernels read, or without Triton "chunks of 64", which plain torch reads. A maker for a new
kind of mixer, or for another table, is one entry of MAKERS, or of PART_MAKERS where it depends on
numbers of the part's config.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from longshore.arch.decoder import DecoderConfig
from longshore.arch.part import Part
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.batch import Boundaries, PackContext, TableMaker
from longshore.model.sparse_attention import EntryKind, entry_tables
from longshore.ops.boundaries import chunk_rows, chunk_table, chunks, conv_spans, filled_spans
from longshore.settings import Kernels, ScanKind
from longshore.user_code import is_installed

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TableSetting:
    """What decides which tables ops will look for."""

    scan: ScanKind
    """How lanes share a scan."""
    device: torch.device
    """Where the ops run."""
    kernels: Kernels
    """auto, or plain for none but torch's own."""

    def has(self, package: str) -> bool:
        """Whether kernels of this package may serve; a call's tensors may still be refused."""
        return self.device.type == "cuda" and self.kernels == "auto" and is_installed(package)


def table_makers(
    decoder: DecoderConfig, *, scan: ScanKind, device: torch.device, kernels: Kernels = "auto"
) -> tuple[TableMaker, ...]:
    """The makers of all kinds of parts in the decoder, each once."""
    layers = (*decoder.layers, *decoder.mtp)
    parts = {part: None for layer in layers for part in layer.parts}
    makers = {maker: None for part in parts for maker in _makers(part)}
    return tuple(partial(maker, setting=TableSetting(scan, device, kernels)) for maker in makers)


def _makers(part: Part) -> tuple[Callable[..., None], ...]:
    make = PART_MAKERS.get(type(part))
    return MAKERS.get(type(part), ()) if make is None else (make(part),)


def ssd_tables(pack: PackContext, *, setting: TableSetting) -> None:
    """The chunks of Mamba2's scan: those of its kernels, or those of plain torch."""
    for bounds in scanned(pack, setting.scan):
        if setting.has("triton"):
            chunk_table(bounds, bounds.offsets[-1], HOST)
            conv_spans(bounds, HOST)
        elif not bounds.fixed:
            _plain_chunks(bounds, setting)


def delta_tables(pack: PackContext, *, setting: TableSetting) -> None:
    """The spans of flash-linear-attention, which may refuse, and the chunks of plain torch.

    A lane's own chunks of a shared pack need transitions, which only plain torch computes.
    """
    for bounds in scanned(pack, setting.scan):
        if not bounds.fixed:
            _plain_chunks(bounds, setting)
        if setting.has("triton"):
            conv_spans(bounds, HOST)
        if bounds is pack.padded and setting.has("fla"):
            filled_spans(bounds, bounds.offsets[-1], HOST)


@dataclass(frozen=True, slots=True)
class EntryTableMaker:
    """What rows see and what entries pool, in layers of this kind."""

    kind: EntryKind

    def __call__(self, pack: PackContext, *, setting: TableSetting) -> None:
        entry_tables(pack, self.kind, HOST)


def _plain_chunks(bounds: Boundaries, setting: TableSetting) -> None:
    """As large as they are on the device; their number is read on the host, so not for graphs."""
    chunks(bounds, bounds.offsets[-1], chunk_rows(setting.device), HOST)


def scanned(pack: PackContext, scan: ScanKind) -> list[Boundaries]:
    """The boundaries that a lane scans: of whole sequences, and of its chunks of a shared pack.

    With `auto` either may be: which one depends on the layer's heads.
    """
    if pack.zigzag is None or scan == "heads":
        return [pack.padded]
    return [pack.zigzag.chunks] if scan == "states" else [pack.padded, pack.zigzag.chunks]


MAKERS: dict[type, tuple[Callable[..., None], ...]] = {
    Mamba2Config: (ssd_tables,),
    DeltaNetConfig: (delta_tables,),
}
"""For each kind of part, functions of (pack, setting) that fill its boundaries' tables."""

PART_MAKERS: dict[type, Callable[[Any], Callable[..., None]]] = {
    SparseAttentionConfig: lambda part: EntryTableMaker(EntryKind.of(part)),
}
"""For each kind of part whose tables depend on its config, what makes such a function; equal ones
serve all parts that they fit."""
