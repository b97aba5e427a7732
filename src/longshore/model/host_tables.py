"""Tables that scans need of each pack's boundaries, made on the host by the loader.

In: a pack, how lanes share a scan, the device that ops run on. Out: tables among the boundaries of
the pack. A table moves to the device with its boundaries, where the op looks for it under the same
name; one that is missing there is made on the spot, once for each micro-batch. So what a maker
leaves out costs time, and nothing else.

With a layer of Mamba2 on a GPU a pack of sequences of 100 and 70 tokens gets "ssd chunks of 64",
which the kernels read, or without Triton "chunks of 64", which plain torch reads.

A maker is a function of (pack, setting=TableSetting), which the class of a mixer names in its
`table_makers(config)`; the packing step calls all of a decoder's (model/registry.py:table_makers)
with each pack. Equal makers serve all layers that name them, once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from longshore.batch import Boundaries, PackContext
from longshore.ops.boundaries import chunk_rows, chunk_table, chunks, conv_spans, filled_spans
from longshore.settings import Kernels, ScanKind
from longshore.user_code import is_installed

HOST = torch.device("cpu")
HostTableMaker = Callable[..., None]


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
