"""The training loop: steps from a loader through a stepper, and a report of each.

In: a Stepper, a loader, a schedule, the number of steps. Out: one Report for each step.

On a GPU the numbers of a step are read when the next step has been queued, so the device never
waits for the host: with steps 1, 2, 3, 4 the reports of 2, 3 and 4 come after the queueing of 3, 4
and 4. So a rank that wants the run to stop in step 2 is heard after step 3 was queued, on all
ranks, and 3 is the last. The first step, and those that a hook wants to see before it goes on, are
read at once; on a CPU, where nothing would be won, all are.
"""

import math
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import torch
from torch import Tensor

from longshore.data.steps import Step
from longshore.train.device import Moment
from longshore.train.metrics import StepMetrics
from longshore.train.optim import Schedule
from longshore.train.step import Stepper, Trained
from longshore.train.stop import RunError

GIB = 2**30
LOOK = "look at its data, lower train.lr, or set train.clip"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run's speed is measured against. peak_flops: of one rank a second, None if unknown."""

    ranks: int
    device: torch.device
    peak_flops: float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps done, and updates: fewer, where steps were skipped."""

    step: int = 0
    updates: int = 0


@dataclass(frozen=True, slots=True)
class Hooks:
    """What else happens, the same on all ranks but for `wants_stop`.

    wants_stop: whether this rank wants the run to stop. reported: the numbers of the steps up to
    this one are finite and were taken. after_step: a step has been queued and the next has not, so
    the model is that of this step: a place to save or evaluate. wants_report: whether the report of
    a step is to come before its after_step, so that the device waits. phase: what happens now,
    until the first report. not_finite: a step and what it left, before the run fails; returns what
    to say of it, and what to do.
    """

    wants_stop: Callable[[], bool] = lambda: False
    reported: Callable[[int], None] = lambda step: None
    after_step: Callable[[Progress], None] = lambda progress: None
    wants_report: Callable[[int], bool] = lambda step: False
    phase: Callable[[str], None] = lambda text: None
    not_finite: Callable[[Step, Trained], str] = lambda step, trained: LOOK


NO_HOOKS = Hooks()
START = Progress()


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A step, and what it measured on this rank.

    rounds_s: seconds of each round. experts: tokens each expert got, by layer of experts, over all
    lanes. Both are () for a skipped step.
    """

    step: Step
    metrics: StepMetrics
    rounds_s: tuple[float, ...]
    experts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """A step whose numbers may still be on their way from the device."""

    step: Step
    lr: float
    trained: Trained | None
    numbers: Tensor
    begin: Moment
    end: Moment

    @property
    def number(self) -> int:
        return self.step.place.step + 1

    @property
    def stops(self) -> bool:
        """Whether a rank wants the run to stop; its numbers have come."""
        return self.trained is not None and bool(self.numbers[0])


def train(
    stepper: Stepper,
    loader: Iterable[Step],
    *,
    steps: int,
    schedule: Schedule,
    flops: Callable[[list[int]], int],
    machine: Machine,
    start: Progress = START,
    hooks: Hooks = NO_HOOKS,
) -> Iterator[Report]:
    """Trains up to a number of steps, and yields what happened in each.

    start: what an earlier run has done; the loader stands there.
    """
    meter = _Meter(flops, machine)
    waiting: _Done | None = None
    updates, stops, is_first = start.updates, False, True
    begin = Moment(machine.device)
    for step in islice(_first_told(loader, hooks), steps - start.step):
        lr = schedule.at(updates)
        trained = stepper.step(step.batches, lr, stop=hooks.wants_stop())
        updates += trained is not None
        done = _Done(step, lr, trained, _on_host(trained), begin, Moment(machine.device))
        if waiting is not None:
            yield _checked(meter.read(waiting), waiting, hooks)
            hooks.reported(waiting.number)
            stops = waiting.stops
        waiting = done
        if is_first or machine.device.type != "cuda" or hooks.wants_report(done.number):
            yield _checked(meter.read(done), done, hooks)
            waiting, stops = None, stops or done.stops
        is_first = False
        hooks.after_step(Progress(done.number, updates))
        if waiting is None:
            hooks.reported(done.number)  # after the hook, which may have begun a checkpoint of it
        begin = Moment(machine.device)  # what the hooks did is no part of the next step
        if stops:
            break
    if waiting is not None:
        yield _checked(meter.read(waiting), waiting, hooks)
        hooks.reported(waiting.number)


def _first_told(loader: Iterable[Step], hooks: Hooks) -> Iterator[Step]:
    """The loader's steps; what goes on before the first, and in it, is told."""
    hooks.phase("planning")
    for number, step in enumerate(loader):
        if number == 0:
            hooks.phase("first step")
        yield step


def _checked(report: Report, done: _Done, hooks: Hooks) -> Report:
    """The report; a loss or a norm that is not finite, the same on all ranks, ends the run."""
    loss, norm = report.metrics.loss, report.metrics.grad_norm
    if all(number is None or math.isfinite(number) for number in (loss, norm)):
        return report
    assert done.trained is not None
    advice = hooks.not_finite(done.step, done.trained)
    raise RunError(f"step {done.number}: the loss is {loss} and the gradient norm {norm}; {advice}")


def _on_host(trained: Trained | None) -> Tensor:
    """Stops, gradient norm, losses, counts of experts: float64, sent at once, to be read later."""
    if trained is None:
        return torch.empty(0)
    first = [trained.stops, trained.grad_norm.view(1), trained.losses]
    all_ = torch.cat([*first, *trained.experts]).double()
    if all_.device.type != "cuda":
        return all_
    host = torch.empty_like(all_, device="cpu", pin_memory=True)
    return host.copy_(all_, non_blocking=True)


class _Meter:
    """Turns finished steps into metrics; a step's time begins with the wait for its data."""

    def __init__(self, flops: Callable[[list[int]], int], machine: Machine) -> None:
        self.flops = flops
        self.machine = machine

    def read(self, done: _Done) -> Report:
        done.end.wait()
        experts = _experts(done)
        losses = len(done.numbers) - sum(map(len, experts))
        norm, loss, balance, *depths = done.numbers[1:losses].tolist() or (None, None, None)
        elapsed = done.end.since(done.begin)
        step, plan = done.step, done.step.plan
        counts = step.batches[0].counts
        flops = self.flops([sequence.length for sequence in plan.sequences])
        each = flops / elapsed / self.machine.ranks
        peak = self.machine.peak_flops
        metrics = StepMetrics(
            step=done.number,
            epoch=step.place.epoch,
            loss=loss,
            loss_tokens=counts.main,
            tokens=counts.tokens,
            sequences=counts.sequences,
            grad_norm=norm,
            lr=done.lr,
            elapsed_s=elapsed,
            tokens_per_s=counts.tokens / elapsed,
            tflops=each / 1e12,
            mfu=each / peak if peak else None,
            rounds=len(plan.rounds),
            efficiency=plan.stats.efficiency,
            padding=plan.stats.padding,
            plan_s=plan.stats.planning_seconds,
            data_wait_s=step.wait_seconds,
            memory_gib=peak_memory(self.machine.device) / GIB,
            skipped=done.trained is None,
            balance_loss=balance or None,
            mtp_losses=tuple(depths) or None,
        )
        return Report(step, metrics, _rounds(done), experts)


def _experts(done: _Done) -> tuple[tuple[int, ...], ...]:
    if done.trained is None or not done.trained.experts:
        return ()
    sizes = [len(layer) for layer in done.trained.experts]
    found = done.numbers[-sum(sizes) :].long().split(sizes)
    return tuple(tuple(layer.tolist()) for layer in found)


def _rounds(done: _Done) -> tuple[float, ...]:
    moments = done.trained.rounds.moments if done.trained else ()
    return tuple(later.since(earlier) for earlier, later in pairwise(moments))


def peak_memory(device: torch.device) -> int:
    """The most bytes this rank ever held: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
