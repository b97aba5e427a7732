"""The steps of a job, trained one after another, and what happens between them.

In: a job, its Parts, and what saves, evaluates and records. Out: a report of each step. Saving,
evaluating and stopping are hooks of the loop in train/loop.py: with output.save_every 500 and
train.eval_every 100 a checkpoint is begun after step 500, and then the held-out data are evaluated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from longshore.arch.costs import step_flops
from longshore.run.job import TrainingJob
from longshore.run.parts import Parts
from longshore.train.checkpoint import Saver
from longshore.train.device import peak_flops
from longshore.train.display import has_step
from longshore.train.evaluation import Evaluator
from longshore.train.failed_step import explain
from longshore.train.heartbeat import SAVING
from longshore.train.loop import Hooks, Machine, Progress, StepReport, train
from longshore.train.optimizer import Schedule
from longshore.train.record import EVALS, RunRecord


@dataclass(frozen=True, slots=True, eq=False)
class StepHooks:
    """What happens with a step's results, before the next step."""

    saver: Saver
    """Saves."""
    evaluator: Evaluator | None
    """Evaluates, if there is held-out data."""
    record: RunRecord
    """Shows what happens before the first report."""
    report: Callable[[StepReport], None]
    """Records a step."""
    wants_stop: Callable[[], bool]
    """Whether this rank wants the run to stop."""
    wants_report: Callable[[], bool] = lambda: False
    """Whether every step is to be read at once, also on a GPU; the same on all ranks."""


def train_steps(job: TrainingJob, parts: Parts, step_hooks: StepHooks) -> Iterator[StepReport]:
    """Trains one step for each report that is read, starting from the saver's progress."""
    _make_up_evaluation(job, parts, step_hooks)
    device = job.topology.device
    yield from train(
        parts.stepper,
        parts.loader,
        steps=job.steps,
        schedule=_schedule(job),
        flops=partial(step_flops, job.decoder),
        machine=Machine(
            ranks=job.topology.world_size,
            device=device,
            peak_flops=peak_flops(device, job.dtype),
        ),
        start=step_hooks.saver.progress,
        hooks=_hooks(job, parts, step_hooks),
    )


def _make_up_evaluation(job: TrainingJob, parts: Parts, step_hooks: StepHooks) -> None:
    """Evaluates the step that a run resumes after, if a signal or a kill has prevented it."""
    evaluator, done = step_hooks.evaluator, step_hooks.saver.progress.step
    is_last = done == job.steps
    if evaluator is None or not done or not evaluator.is_due(done, is_last=is_last):
        return
    evals = parts.checkpoints.run / EVALS
    if parts.any_rank([job.topology.rank == 0 and not has_step(evals, done)])[0]:
        evaluator.after_step(done, is_last=is_last)
        job.status.at("waiting for data")


def _schedule(job: TrainingJob) -> Schedule:
    train = job.config.train
    return Schedule(
        kind=train.schedule,
        lr=train.lr,
        warmup=warmup_steps(train.warmup, job.steps),
        updates=job.steps,
        min_lr=train.min_lr,
    )


def warmup_steps(warmup: float, steps: int) -> int:
    """Steps of a warmup that is given in steps, or as a share of all steps."""
    return max(1, round(warmup * steps)) if 0 < warmup < 1 else int(warmup)


def _hooks(job: TrainingJob, parts: Parts, step_hooks: StepHooks) -> Hooks:
    steps = _BetweenSteps(job, step_hooks.saver, step_hooks.evaluator)
    checkpoints = parts.checkpoints
    return Hooks(
        wants_stop=step_hooks.wants_stop,
        any_rank=parts.any_rank,
        report=step_hooks.report,
        reported=checkpoints.confirm,
        after_step=steps.after_step,
        wants_report=lambda step: step_hooks.wants_report() or steps.is_evaluated(step),
        phase=partial(_show_phase, job, step_hooks.record),
        not_finite=partial(explain, checkpoints.run, parts.stepper),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _BetweenSteps:
    """Saves, then evaluates, and updates this rank's status."""

    job: TrainingJob
    saver: Saver
    evaluator: Evaluator | None

    def after_step(self, progress: Progress) -> None:
        status = self.job.status
        status.at(SAVING)
        self.saver.after_step(progress)
        if self.evaluator is not None:
            self.evaluator.after_step(progress.step, is_last=progress.step == self.job.steps)
        status.at("waiting for data", step=progress.step + 1)

    def is_evaluated(self, step: int) -> bool:
        is_last = step == self.job.steps
        return self.evaluator is not None and self.evaluator.is_due(step, is_last=is_last)


def _show_phase(job: TrainingJob, record: RunRecord, name: str) -> None:
    """The first step may take long; it says why."""
    why = ""
    if name == "first step" and job.topology.device.type == "cuda":
        why = " (compiling kernels)"
    elif name == "first step" and job.resolved.compile:
        why = " (compiling)"
    record.phase(f"{name}{why}…")
