"""Room on the disks: what a run or scores take, compared with what is free, before the first step.

In: a config and its decoder, or data. Out: nothing, or a ValueError that names the folder, the
bytes and the way out. A model of 8 billion parameters in training takes 96 GB for a checkpoint with
its moments, 32 GB for its weights and, in bfloat16, 16 GB for its export; on one disk they are
needed together. The older checkpoints that output.keep allows are not counted: a run warns about
these. No torch.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig
from longshore.config.schema import RunConfig
from longshore.data.fields import Field
from longshore.files import SPARE, free_bytes, size_text
from longshore.plan.cost import Ints

MOMENTS = 2
"""Of AdamW, for each parameter."""


def written_bytes(config: RunConfig, decoder: DecoderConfig) -> dict[str, int]:
    """What each of the run's outputs takes, by its key."""
    parameters, output = parameter_count(decoder), config.output
    kept = 0 if decoder.lora is not None else parameters  # adapters are small
    trained = 8 if config.train.dtype == "float64" else 4
    sizes = {}
    if output.keep and kept:
        sizes["checkpoint"] = (1 + MOMENTS) * trained * kept
    if output.weights and kept:
        sizes["weights"] = trained * kept
    if output.export:
        low = config.train.dtype in ("auto", "bfloat16")
        sizes["export"] = (2 if low else trained) * parameters
    return sizes


def check_disks(config: RunConfig, decoder: DecoderConfig) -> None:
    """Refuses a run whose first checkpoint, weights and export do not fit on their disks."""
    output = config.output
    disks: dict[int, list[tuple[str, Path, int]]] = {}
    for what, size in written_bytes(config, decoder).items():
        folder = Path(output.export if what == "export" else output.folder).absolute()
        above = next(path for path in (folder, *folder.parents) if path.exists())
        disks.setdefault(disk_of(above), []).append((what, above, size))
    for needs in disks.values():
        above = needs[0][1]
        free, needed = free_bytes(above), sum(size for _, _, size in needs) + SPARE
        if free is not None and needed > free:
            parts = ", ".join(f"{what} {size_text(size)}" for what, _, size in needs)
            key = "output.export" if needs[0][0] == "export" else "output.folder"
            raise ValueError(
                f"{key}: the run writes {size_text(needed)} ({parts}), but only "
                f"{size_text(free)} are free in {above}; make room, name folders on other disks, "
                "or write less with output.keep=0 or output.weights=false"
            )


def check_scored(out: str, fields: Sequence[Field], lengths: Ints) -> None:
    """Refuses scores that do not fit on their disk. fields: all that is written beside tokens."""
    needed = scored_bytes(out, fields, lengths) + SPARE
    free = free_bytes(Path(out).absolute().parent)
    if free is not None and needed > free:
        raise ValueError(
            f"--out: {out} takes {size_text(needed)}, but only {size_text(free)} are free there; "
            "make room, or name a place on another disk"
        )


def scored_bytes(out: str, fields: Sequence[Field], lengths: Ints) -> int:
    """Bytes of tokens and fields; of Parquet, which compresses, the scores alone."""
    tokens, total = int(lengths.sum()), 0
    is_parquet = out.endswith(".parquet")
    for field in fields[-1:] if is_parquet else fields:
        values = len(lengths) if field.per == "sequence" else tokens
        total += values * field.width * np.dtype(field.dtype).itemsize
    return total if is_parquet else total + tokens * np.dtype(np.int32).itemsize


def disk_of(path: Path) -> int:
    """The number of the disk that a path is on."""
    return os.stat(path).st_dev
