"""Models of transformers in a run: made, split over the lanes, filled, and written at its end.

In: a job with model.code=transformers. Out: a TransformersModel with the weights of model.from_hf,
of which each rank reads what it holds; and after the last step RUN/weights and output.export, under
the names that transformers gives its tensors. With zero3 on 4 ranks each reads a quarter.
"""

from pathlib import Path

import torch
from torch import nn

from longshore.config.located import in_keys, settings_in_keys
from longshore.distributed.agreement import agreed
from longshore.distributed.cp_groups import CPGroups
from longshore.hf.adapter import check_foreign
from longshore.hf.foreign_lora import add_foreign_factors
from longshore.hf.foreign_weights import fill_foreign
from longshore.hf.transformers_model import TransformersModel, adapted, empty_model
from longshore.model.lora import hold_frozen
from longshore.parallel.apply import Choices, parallelize
from longshore.run.job import TrainingJob, longest_of


def make_foreign(job: TrainingJob, groups: CPGroups, choices: Choices) -> TransformersModel:
    """All ranks call it together; what cannot be trained exactly is refused here."""
    folder, dtype = job.config.model.from_hf, torch.promote_types(job.dtype, torch.float32)
    with agreed(job.topology.groups):
        try:
            hf = empty_model(folder, dtype)
            check_foreign(hf)
        except ValueError as error:
            raise ValueError(f"model.from_hf: {Path(folder)}: {error}") from None
        for parameter in hf.parameters():
            parameter.data = parameter.data.to(dtype)
        model = adapted(hf, job.decoder)
        check_positions(model, longest_of(job.source))
        if job.decoder.lora is not None:
            with settings_in_keys():
                add_foreign_factors(model, job.decoder.lora)
            hold_frozen(model, job.dtype)
    parallelize(model, job.topology, groups, choices=choices)
    with agreed(job.topology.groups):
        fill_foreign(model, job.topology.device, folder, seed=job.config.train.seed)
    return model


def check_positions(model: nn.Module, longest: int, key: str = "data.path") -> None:
    """Refuses data that a learned table of positions is too short for, before any step."""
    if isinstance(model, TransformersModel):
        with in_keys(key):
            model.check_longest(longest)
