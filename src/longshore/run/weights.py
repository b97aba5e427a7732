"""The trained weights, written once a run is at its end.

In: a job, its model and the run's folder. Out: RUN/weights, and output.export as a Hugging Face
folder. All ranks come here together: rank 0 writes one whole tensor at a time, and the others bring
their rows of it, so no rank ever holds the whole model.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from longshore.arch.costs import parameter_count
from longshore.files import check_room
from longshore.hf.checkpoint import write_checkpoint
from longshore.hf.foreign_weights import write_foreign
from longshore.hf.transformers_model import TransformersModel
from longshore.hf.weights import save_weights
from longshore.parallel.pipeline.gathered import gathered_tensors
from longshore.parallel.pipeline.stages import Model
from longshore.run.job import TrainingJob
from longshore.train.checkpoint_files import writing


def write_weights(
    job: TrainingJob, model: Model, *, folder: Path, note: Callable[[str], None]
) -> None:
    """Writes what output.weights and output.export ask for; note: shows what was written."""
    output = job.config.output
    if job.topology.rank:
        for _ in range(output.weights + bool(output.export)):
            for _ in gathered_tensors(model, job.topology):
                pass
        return
    files = ["config.toml", "metrics.jsonl"]
    if output.weights:
        _write_weights(job, model, folder)
        files.append("weights")
    note(f"wrote {folder}: {', '.join(files)}")
    if output.export:
        _export(job, model, folder)
        note(f"wrote {output.export}, a Hugging Face folder")


def _write_weights(job: TrainingJob, model: Model, folder: Path) -> None:
    """RUN/weights: in the dtype of training."""
    with writing(folder / "weights", then=f"write it again with --resume {folder}"):
        check_room(folder, _size(model))
        save_weights(
            folder / "weights",
            job.decoder,
            gathered_tensors(model, job.topology),
            base=job.config.model.from_hf or None,
            is_replaced=True,
            code=job.config.model.code,
        )


def _export(job: TrainingJob, model: Model, folder: Path) -> None:
    """A Hugging Face folder; in bfloat16 where the arithmetic was."""
    export = job.config.output.export
    low = torch.bfloat16 if job.dtype == torch.bfloat16 else None
    with writing(Path(export), then=f"longshore export {folder} {export}"):
        check_room(Path(export), _size(model) // 2 if low else _size(model))
        if isinstance(model, TransformersModel):
            stream = gathered_tensors(model, job.topology)
            base = job.config.model.from_hf
            write_foreign(export, stream, base=base, tied=model.tied, dtype=low)
            return
        write_checkpoint(
            export,
            job.decoder,
            gathered_tensors(model, job.topology),
            base=job.config.model.from_hf or None,
            dtype=low,
        )


def _size(model: Model) -> int:
    """Bytes of the whole model."""
    return parameter_count(model.config) * next(model.parameters()).element_size()
