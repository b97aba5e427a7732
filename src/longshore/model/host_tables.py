"""Tables that a decoder's ops need of each pack's boundaries, made on the host by the loader.

In: a decoder's config, how lanes share a scan, the device it runs on. Out: functions that the
packing step calls with each pack (data/steps.py: Packing.tables). A table moves to the device with
its boundaries, where the op looks for it under the same name; one that is missing there is made on
the spot, once for each micro-batch. So what a maker leaves out costs time, and nothing else.

    table_makers(preset("tiny-llama"), scan="auto", device=device)     ()

With a layer of Mamba2 on a GPU a pack of sequences of 100 and 70 tokens gets "chunks of 64". A
maker for a new kind of mixer, or for another table, is one entry of MAKERS.
"""

from collections.abc import Callable
from functools import partial

import torch

from longshore.arch.decoder import DecoderConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.batch import Boundaries, PackContext, TableMaker
from longshore.choices import ScanKind
from longshore.ops.boundaries import chunk_rows, chunks

HOST = torch.device("cpu")


def table_makers(
    decoder: DecoderConfig, *, scan: ScanKind, device: torch.device
) -> tuple[TableMaker, ...]:
    """The makers of all kinds of parts in the decoder, each once."""
    layers = (*decoder.layers, *decoder.mtp)
    kinds = {type(part): None for layer in layers for part in layer.parts}
    makers = {maker: None for kind in kinds for maker in MAKERS.get(kind, ())}
    return tuple(partial(maker, scan=scan, device=device) for maker in makers)


def scan_chunks(pack: PackContext, *, scan: ScanKind, device: torch.device) -> None:
    """The chunks that a plain scan cuts a pack into, as large as they are on `device`."""
    for bounds in scanned(pack, scan):
        chunks(bounds, bounds.offsets[-1], chunk_rows(device), HOST)


def scanned(pack: PackContext, scan: ScanKind) -> list[Boundaries]:
    """The boundaries that a lane scans: of whole sequences, and of its chunks of a shared pack.

    With `auto` either may be: which one depends on the layer's heads.
    """
    if pack.zigzag is None or scan == "heads":
        return [pack.padded]
    return [pack.zigzag.chunks] if scan == "states" else [pack.padded, pack.zigzag.chunks]


MAKERS: dict[type, tuple[Callable[..., None], ...]] = {
    Mamba2Config: (scan_chunks,),
    DeltaNetConfig: (scan_chunks,),
}
"""For each kind of part, functions of (pack, scan, device) that fill its boundaries' tables."""
