"""The trained weights, written once a run is at its end.

In: a job, its model and the run's folder. Out: RUN/weights, and output.export as a Hugging Face
folder. All ranks come here together: rank 0 writes one whole tensor at a time, and the others bring
their rows of it, so no rank ever holds the whole model.
"""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from longshore.arch.costs import parameter_count
from longshore.distributed.agreement import agreed
from longshore.files import check_room
from longshore.hf.checkpoint import write_checkpoint
from longshore.hf.config_file import choose_architecture
from longshore.hf.foreign_weights import write_foreign
from longshore.hf.lora import factor_shapes, merged_stream
from longshore.hf.transformers_model import TransformersModel
from longshore.hf.weights import save_weights
from longshore.model.lora import is_factor
from longshore.parallel.pipeline.gathered import gathered_tensors
from longshore.parallel.pipeline.stages import Model
from longshore.run.folder import check_new_folder
from longshore.run.job import TrainingJob
from longshore.train.checkpoint_files import writing


def write_weights(
    job: TrainingJob, model: Model, *, folder: Path, note: Callable[[str], None]
) -> None:
    """Writes what output.weights and output.export ask for; note: shows what was written."""
    output = job.config.output
    if job.topology.rank:
        for _ in _saved(job, model) if output.weights else ():
            pass
        for _ in gathered_tensors(model, job.topology) if output.export else ():
            pass
        return
    files = ["config.toml", "metrics.jsonl"]
    if output.weights:
        _write_weights(job, model, folder)
        files.append("weights")
    note(f"wrote {folder}: {', '.join(files)}")
    if output.export:
        with writing(Path(output.export), then=f"longshore export {folder} {output.export}"):
            _check_export(job, model, output.export)
            _export(job, model, output.export)
        note(f"wrote {output.export}, a Hugging Face folder")


def _saved(job: TrainingJob, model: Model) -> Iterator[tuple[str, Tensor]]:
    """What RUN/weights holds: everything, or the low-rank factors alone."""
    only = is_factor if job.decoder.lora is not None else None
    return gathered_tensors(model, job.topology, only=only)


def _write_weights(job: TrainingJob, model: Model, folder: Path) -> None:
    """RUN/weights: in the dtype of training."""
    lora = job.base
    with writing(folder / "weights", then=f"write it again with --resume {folder}"):
        check_room(folder, _size(model) if lora is None else _factor_bytes(model))
        save_weights(
            folder / "weights",
            job.decoder,
            _saved(job, model),
            base=job.config.model.from_hf or None,
            is_replaced=True,
            lora=lora,
            code=job.config.model.code,
        )


def export_weights(job: TrainingJob, model: Model, folder: str) -> None:
    """A Hugging Face folder of the weights as they are now. All ranks call it together."""
    with agreed(job.topology.groups):
        if job.topology.rank == 0:
            check_new_folder(folder, "export")
            with writing(Path(folder), then="export it again"):
                _check_export(job, model, folder)
    if job.topology.rank:
        for _ in gathered_tensors(model, job.topology):
            pass
        return
    with writing(Path(folder), then="export it again"):
        _export(job, model, folder)


def _check_export(job: TrainingJob, model: Model, folder: str) -> None:
    """Refuses on rank 0 what it could not write, before the other ranks send anything."""
    check_room(Path(folder), _size(model) // (2 if _low_dtype(job) else 1))
    if not isinstance(model, TransformersModel):
        base = job.config.model.from_hf
        choose_architecture(job.decoder.merged(), Path(base) if base else None)


def _low_dtype(job: TrainingJob) -> torch.dtype | None:
    """Weights are exported in bfloat16 where the arithmetic was; None: as they are."""
    return torch.bfloat16 if job.dtype == torch.bfloat16 else None


def _export(job: TrainingJob, model: Model, folder: str) -> None:
    """Rank 0's part."""
    low = _low_dtype(job)
    tensors = gathered_tensors(model, job.topology)
    if job.decoder.lora is not None:
        tensors = merged_stream(job.decoder.lora, _factors(model), tensors)
    if isinstance(model, TransformersModel):
        base = job.config.model.from_hf
        write_foreign(folder, tensors, base=base, tied=model.tied, dtype=low)
        return
    write_checkpoint(
        folder,
        job.decoder.merged(),
        tensors,
        base=job.config.model.from_hf or None,
        dtype=low,
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
    """Of all low-rank factors, in float64 at most."""
    return 8 * sum(map(prod, _factors(model).values()))
