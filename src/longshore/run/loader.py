"""The steps of a run: which sequences each takes, how they are planned, and who makes them ahead.

In: a job. Out: the Loader that training reads from, or the Evaluator of its held-out data. With
data.batch 64 on 4 lanes, a step is one plan of 64 sequences and this lane's micro-batches of it.
"""

from functools import partial

from longshore.config.check import check_longest, planner_options
from longshore.config.schema import RunConfig
from longshore.data.loader import Loader
from longshore.data.source import IndexedSource
from longshore.data.steps import IndexedSteps, Packing, Planner
from longshore.distributed.collectives import agreed
from longshore.plan.planner import make_plan
from longshore.plan.shapes import make_buckets
from longshore.run.data import batch_size, held_out, open_sequences
from longshore.run.job import TrainingJob
from longshore.train.evaluation import Evaluator, HeldOut, OnEvaluation
from longshore.train.step import Stepper


def make_planner(job: TrainingJob) -> Planner:
    """make_plan with all of its options given; only the sequences of a step are missing."""
    options = planner_options(
        job.config,
        lanes=job.topology.lanes,
        capacity=job.resolved.capacity,
        decoder=job.decoder,
    )
    return partial(make_plan, **options)


def make_loader(job: TrainingJob) -> Loader:
    data = job.config.data
    steps = _make_steps(job, job.config, source=job.source, shuffle=data.shuffle)
    return Loader(steps, prefetch=data.prefetch, pin=job.topology.device.type == "cuda")


def make_evaluator(job: TrainingJob, stepper: Stepper, *, tell: OnEvaluation) -> Evaluator | None:
    """What evaluates the run's held-out data, if it has any."""
    config = held_out(job.config)
    if config is None:
        return None
    with agreed(job.topology.groups):
        source = open_sequences(config, job.decoder)
        check_longest(config, job.topology.lanes, int(source.lengths.max()))
    return Evaluator(
        HeldOut("held-out", _make_steps(job, config, source=source, shuffle=False)),
        stepper.model,
        job.topology,
        every=job.config.train.eval_every,
        tell=tell,
        status=job.status,
    )


def _make_steps(
    job: TrainingJob, config: RunConfig, *, source: IndexedSource, shuffle: bool
) -> IndexedSteps:
    """config: the job's, or that of its held-out data."""
    plan = config.plan
    buckets: tuple[int, ...] = ()
    if plan.buckets:
        buckets = make_buckets(job.resolved.capacity, align=plan.align, count=plan.buckets)
    return IndexedSteps(
        source,
        planner=make_planner(job),
        batch=batch_size(config),
        seed=config.data.seed,
        shuffle=shuffle,
        topology=job.topology,
        packing=Packing(depths=len(job.decoder.mtp), buckets=buckets),
    )
