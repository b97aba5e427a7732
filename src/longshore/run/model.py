"""The model of a run on this rank: built, made parallel, filled with weights, with its optimizer.

In: a job. Out: a Stepper, which trains one step at a time. The decoder is built without memory,
`parallelize` splits it, and only then each rank makes or reads the rows it holds: with zero3 on 4
ranks, 139,584 parameters become 34,896 on each.
"""

from functools import partial

import torch

from longshore.distributed.cp_groups import CPGroups
from longshore.hf.checkpoint import open_weights
from longshore.model.decoder import Decoder
from longshore.model.init import initial_rows
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.fsdp import fill
from longshore.plan.types import Sequence
from longshore.run.job import TrainingJob
from longshore.run.loader import make_planner
from longshore.train.loss import make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.step import Stepper


def make_cp_groups(job: TrainingJob) -> CPGroups:
    """The process groups of all CP sizes that the run's plans may use."""
    smallest_plan = make_planner(job)([Sequence(0, 1, 1)])
    return CPGroups(job.topology, smallest_plan.setting.cp_sizes)


def make_stepper(job: TrainingJob, groups: CPGroups) -> Stepper:
    """The model with its first weights, its optimizer and its loss."""
    train, model = job.config.train, _make_model(job, groups)
    return Stepper(
        model=model,
        optimizer=make_optimizer(
            model, weight_decay=train.weight_decay, betas=train.betas, eps=train.eps
        ),
        topology=job.topology,
        mode=job.resolved.shard,
        loss=make_loss(train.loss, train.loss_count),
        clip=train.clip,
        mtp_weight=train.mtp_weight,
        status=job.status,
    )


def _make_model(job: TrainingJob, groups: CPGroups) -> Decoder:
    """The decoder with its first weights; each rank makes or reads only the rows it holds."""
    with torch.device("meta"):
        model = Decoder(job.decoder).to(torch.promote_types(job.dtype, torch.float32))
    parallelize(model, job.topology, groups, choices=_choices(job))
    _fill(model, job)
    return model


def _choices(job: TrainingJob) -> Choices:
    parallel, train = job.config.parallel, job.config.train
    return Choices(
        mode=job.resolved.shard,
        dtype=job.dtype,
        attention=parallel.attention,
        scan=parallel.scan,
        recompute=train.recompute,
        compile=train.compile,
    )


def _fill(model: Decoder, job: TrainingJob) -> None:
    """Weights of a checkpoint, or new ones from the seed."""
    config, device = job.config, job.topology.device
    if config.model.from_hf:
        weights = open_weights(config.model.from_hf)
        fill(model, device, lambda name, _, start, stop: weights.rows(name, start, stop))
    else:
        fill(model, device, partial(initial_rows, job.decoder, seed=config.train.seed))
