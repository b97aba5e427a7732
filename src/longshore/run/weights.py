"""The trained weights, written once a run is at its end, and those of a checkpoint, to be exported.

In: a job, its model and the run's folder. Out: RUN/weights, and output.export as a Hugging Face
folder. All ranks come here together: rank 0 writes one whole tensor at a time, and the others bring
their rows of it, so no rank ever holds the whole model. If rank 0 cannot write, every rank raises
the same RunError, with the file, what it takes, what is free and the way out:

    out/.model.partial-4711/0.part cannot be written (No space left on device: it takes 16.0 GB, and
    9.1 GB are free without it); make room there, then export it again

`open_checkpoint` reads RUN/checkpoints/step-N without any ranks: its decoder from RUN/config.toml,
its tensors in the order in which the run itself would export them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from longshore.arch.costs import parameter_count
from longshore.config.check import decoder_config
from longshore.config.load import load_config
from longshore.distributed.collectives import PeerError, write_on_rank_0
from longshore.distributed.topology import Groups
from longshore.files import check_room
from longshore.hf.checkpoint import write_checkpoint
from longshore.hf.config_file import choose_architecture
from longshore.hf.lora import base_from_json, factor_shapes, merged_stream
from longshore.hf.transformers_model import TransformersModel
from longshore.hf.transformers_weights import write_transformers
from longshore.hf.weights import SavedWeights, save_weights
from longshore.model.lora import is_factor
from longshore.parallel.gathered import gathered_tensors
from longshore.parallel.pipeline import Model, tensor_names
from longshore.run.folder import CONFIG, check_new_folder
from longshore.run.parts import TrainingJob
from longshore.train.checkpoint_files import DamagedError, read_index
from longshore.train.safetensors_stream import CheckpointTensors
from longshore.train.supervision import RunError, writing

Item = TypeVar("Item")


def write_shared(
    items: Iterator[Item],
    groups: Groups,
    write: Callable[[Iterator[Item]], None],
    *,
    target: Path,
    then: str,
    check: Callable[[], int] = lambda: 0,
    every: int = 1,
) -> None:
    """All ranks call it together; see distributed/collectives.py.

    target: what is written. then: the advice after an error, once its cause is gone. check: refuses
    on rank 0 what cannot be written, before the first item, and returns the bytes it will take.
    """

    def checked(stream: Iterator[Item]) -> None:
        with writing(target, then=then):
            needed = check()
        with writing(target, then=then, needed=needed):
            write(stream)

    try:
        write_on_rank_0(items, groups, checked, every=every)
    except PeerError as error:
        if error.kind == RunError.__name__:
            raise RunError(error.message) from None
        raise


Tensors = Iterator[tuple[str, Tensor]]

EVERY = 16
"""Tensors after which the ranks agree that rank 0 could write them."""


def write_weights(
    job: TrainingJob, model: Model, *, folder: Path, note: Callable[[str], None]
) -> None:
    """Writes what output.weights and output.export ask for; note: shows what was written."""
    output, is_first = job.config.output, job.topology.rank == 0
    files = ["config.toml", "metrics.jsonl"]
    if output.weights:
        _write_weights(job, model, folder)
        files.append("weights")
    if is_first:
        note(f"wrote {folder}: {', '.join(files)}")
    if output.export:
        then = f"longshore export {folder} {output.export}"
        if not output.weights:  # which that command reads
            then = f"write it again with --resume {folder}"
        check = partial(_check_export, job, model, output.export)
        _export(job, model, output.export, check=check, then=then)
        if is_first:
            note(f"wrote {output.export}, a Hugging Face folder")


def _write_weights(job: TrainingJob, model: Model, folder: Path) -> None:
    """RUN/weights: everything in the dtype of training, or the low-rank factors alone."""
    lora, target = job.base if job.decoder.lora else None, folder / "weights"

    def check() -> int:
        needed = _size(model) if lora is None else _factor_bytes(model)
        check_room(folder, needed)
        return needed

    def write(tensors: Tensors) -> None:
        save_weights(
            target,
            job.decoder,
            tensors,
            base=job.config.model.from_hf or None,
            is_replaced=True,
            lora=lora,
            code=job.config.model.code,
        )

    only = is_factor if job.decoder.lora is not None else None
    write_shared(
        gathered_tensors(model, job.topology, only=only),
        job.topology.groups,
        write,
        target=target,
        then=f"write it again with --resume {folder}",
        check=check,
        every=EVERY,
    )


def export_weights(job: TrainingJob, model: Model, folder: str) -> None:
    """A Hugging Face folder of the weights as they are now. All ranks call it together."""

    def check() -> int:
        check_new_folder(folder, "export")
        return _check_export(job, model, folder)

    _export(job, model, folder, check=check, then="export it again")


def _check_export(job: TrainingJob, model: Model, folder: str) -> int:
    """Refuses what could not be written; returns its bytes."""
    needed = _size(model) // (2 if _low_dtype(job) else 1)
    check_room(Path(folder), needed)
    if not isinstance(model, TransformersModel):
        base = job.config.model.from_hf
        choose_architecture(job.decoder.merged(), Path(base) if base else None)
    return needed


def _low_dtype(job: TrainingJob) -> torch.dtype | None:
    """Weights are exported in bfloat16 where the arithmetic was; None: as they are."""
    return torch.bfloat16 if job.dtype == torch.bfloat16 else None


def _export(
    job: TrainingJob, model: Model, folder: str, *, check: Callable[[], int], then: str
) -> None:
    low, base = _low_dtype(job), job.config.model.from_hf

    def write(tensors: Tensors) -> None:
        if job.decoder.lora is not None:
            tensors = merged_stream(job.decoder.lora, _factors(model), tensors)
        if isinstance(model, TransformersModel):
            write_transformers(folder, tensors, base=base, tied=model.tied, dtype=low)
        else:
            write_checkpoint(folder, job.decoder.merged(), tensors, base=base or None, dtype=low)

    write_shared(
        gathered_tensors(model, job.topology),
        job.topology.groups,
        write,
        target=Path(folder),
        then=then,
        check=check,
        every=EVERY,
    )


def _size(model: Model) -> int:
    """Bytes of the whole model."""
    item = max(parameter.element_size() for parameter in model.parameters())
    return parameter_count(model.config) * item


def _factors(model: Model) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all low-rank factors, those of other pipeline ranks too."""
    if isinstance(model, TransformersModel):
        named = model.named_parameters()
        return {name: tuple(each.shape) for name, each in named if is_factor(name)}
    return factor_shapes(model.config)


def _factor_bytes(model: Model) -> int:
    """Bytes of all low-rank factors, in float64 at most."""
    return 8 * sum(map(prod, _factors(model).values()))


def open_checkpoint(folder: Path, *, base: Path | None) -> SavedWeights:
    """base: where the Hugging Face folder that the run began with is now; None: where it was."""
    path = folder.resolve().parent.parent / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{folder} is not in a run's folder: {path}, which describes its model, does not exist"
        )
    model = load_config(str(path)).model
    if model.from_hf and base is not None:
        model = replace(model, from_hf=str(base))
    if model.from_hf and not Path(model.from_hf).is_dir():
        raise ValueError(
            f"the run began with {model.from_hf}, which does not exist; name its folder with --base"
        )
    config = decoder_config(model)
    try:
        names = tensor_names(config) if model.code == "longshore" else _saved_names(folder)
        if config.lora is not None:
            names = [*filter(is_factor, names)]
        tensors = CheckpointTensors(folder, names)
    except DamagedError as error:
        raise ValueError(f"{error}; export another checkpoint") from None
    began = base or (Path(model.from_hf) if model.from_hf else None)
    lora = base_from_json(tensors.index.base) if config.lora else None
    return SavedWeights(config=config, base=began, tensors=tensors, lora=lora, code=model.code)


def _saved_names(folder: Path) -> list[str]:
    """Names of all tensors of a checkpoint, where only transformers knows them."""
    names = read_index(folder).tensors
    return [name.removeprefix("model.") for name in names if name.startswith("model.")]
