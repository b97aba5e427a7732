"""The training loop: steps from a loader through a stepper, and a report of each.

In: a Stepper, a loader, a schedule, the number of steps. Out: one StepReport for each step.

On a GPU the numbers of a step are read after the next step was queued, so the device never waits
for the host: with steps 1, 2, 3, 4 the reports of 2, 3 and 4 come after 3, 4 and 4 were queued. The
first step, and those whose report a hook wants first, are read at once; so are all on a CPU, and
those that follow a step of SLOW_S seconds.

Before each step, and before its sequences are drawn, the ranks ask each other whether to stop: a
rank that is asked in step 2 ends the run after step 2 or, where step 3 is queued already, after 3.
"""

import math
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from longshore.data.steps import Step
from longshore.parallel.pipeline import Timestamp
from longshore.plan.graph_use import GRAPH_WAYS
from longshore.plan.layout import Kind
from longshore.train.cuda_graph import GraphedLayers
from longshore.train.display import StepMetrics
from longshore.train.optimizer import Schedule
from longshore.train.step import Stepper, StepResult
from longshore.train.stop import RunError

GIB = 2**30
SLOW_S = 2.0
"""After a step this long none is queued ahead: it could not be stopped, and would gain little."""
ADVICE = "look at its data, lower train.lr, or set train.clip"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run's speed is measured against."""

    ranks: int
    device: torch.device
    peak_flops: float | None
    """Of one rank, per second; None if unknown."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps done, and updates: fewer, where steps were skipped."""

    step: int = 0
    updates: int = 0


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of the loop; all ranks must return the same, except for `wants_stop`."""

    wants_stop: Callable[[], bool] = lambda: False
    """Whether this rank wants the run to stop."""
    any_rank: Callable[[Sequence[bool]], list[bool]] = list
    """Which of these flags any rank has set; all ranks ask together, before each step."""
    report: "Callable[[StepReport], None]" = lambda report: None
    """A step's report, before its after_step if the step was read at once."""
    reported: Callable[[int], None] = lambda step: None
    """The steps up to this one were reported, and their numbers are finite."""
    after_step: Callable[[Progress], None] = lambda progress: None
    """A step was queued and the next was not, so the model is that of this step: save, evaluate."""
    wants_report: Callable[[int], bool] = lambda step: False
    """Whether a step is to be reported before its after_step, for which the host has to wait."""
    phase: Callable[[str], None] = lambda text: None
    """What happens now, before the first report."""
    not_finite: Callable[[Step, StepResult], str] = lambda step, result: ADVICE
    """A step whose loss or norm is not finite, before the run fails; returns text and advice."""


NO_HOOKS = Hooks()
START = Progress()


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """A step, and what this rank measured of it."""

    step: Step
    """Its plan, its micro-batches and its place in the run."""
    metrics: StepMetrics
    """What is shown and recorded."""
    rounds_s: tuple[float, ...]
    """Seconds of each round; () for a skipped step."""
    experts: tuple[tuple[int, ...], ...]
    """Tokens routed to each expert over all lanes, by MoE layer; () for a skipped step."""
    stages: tuple[tuple[int, float, float], ...] = ()
    """Of each stage of this rank its number, the seconds of its forwards and of its backwards."""


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedStep:
    """A step that was queued; its numbers may still be on their way from the device."""

    step: Step
    """Its micro-batches and plan."""
    lr: float
    """The learning rate of its update."""
    result: StepResult | None
    """None for a skipped step."""
    numbers: Tensor
    """On the host, see _on_host; valid once `end` was reached."""
    begin: Timestamp
    """Before its first round."""
    end: Timestamp
    """After its update."""

    @property
    def number(self) -> int:
        return self.step.place.step + 1


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
) -> Iterator[StepReport]:
    """Trains up to step `steps`, and yields a report of each step, after its hooks were called.

    start: the progress to resume from; the loader is already there.
    """
    meter = _Meter(flops, machine, stepper.graphs, stepper.loss.metrics)
    waiting: _QueuedStep | None = None
    updates, is_first = start.updates, True
    begin = Timestamp(machine.device)
    coming = islice(_announced(loader, hooks), steps - start.step)
    while True:
        stops, is_slow = hooks.any_rank([hooks.wants_stop(), meter.elapsed_s >= SLOW_S])
        if stops or (step := next(coming, None)) is None:
            break
        reports, lr = [], schedule.at(updates)
        result = stepper.step(step.batches, lr, plan=step.plan)
        updates += result is not None
        done = _QueuedStep(step, lr, result, _on_host(result), begin, Timestamp(machine.device))
        if waiting is not None:
            reports.append(_reported(meter.read(waiting), waiting, hooks))
            hooks.reported(waiting.number)
        waiting, is_at_once = done, is_first or is_slow or machine.device.type != "cuda"
        if is_at_once or hooks.wants_report(done.number):
            report = meter.read(done)
            if is_first:
                _check_gradient(done, stepper.loss.name)
            reports.append(_reported(report, done, hooks))
            waiting = None
        is_first = False
        hooks.after_step(Progress(done.number, updates))
        if waiting is None:
            hooks.reported(done.number)  # after the hook, which may have started its checkpoint
        yield from reports
        begin = Timestamp(machine.device)  # time between steps is not part of the next step
    if waiting is not None:
        report = _reported(meter.read(waiting), waiting, hooks)
        hooks.reported(waiting.number)
        yield report


def _announced(loader: Iterable[Step], hooks: Hooks) -> Iterator[Step]:
    """The loader's steps; the phases before the first report are announced."""
    hooks.phase("planning")
    for number, step in enumerate(loader):
        if number == 0:
            hooks.phase("first step")
        yield step


def _reported(report: StepReport, done: _QueuedStep, hooks: Hooks) -> StepReport:
    """Hands it on; a loss or a norm that is not finite, the same on all ranks, ends the run."""
    loss, norm = report.metrics.loss, report.metrics.grad_norm
    if all(number is None or math.isfinite(number) for number in (loss, norm)):
        hooks.report(report)
        return report
    assert done.result is not None
    advice = hooks.not_finite(done.step, done.result)
    raise RunError(f"step {done.number}: the loss is {loss} and the gradient norm {norm}; {advice}")


def _check_gradient(done: _QueuedStep, loss: str) -> None:
    """Ends a run whose loss function trains nothing; the numbers are the same on all ranks."""
    if done.result is not None and done.numbers[0]:
        raise RunError(
            f"step {done.number}: train.loss={loss} returned values without a gradient, so nothing "
            "would be trained; compute them from what it gets, without detach(), item(), "
            "torch.no_grad() or whole numbers"
        )


def _on_host(result: StepResult | None) -> Tensor:
    """As float64: whether the loss has no gradient, the norm, layers by what served them, the
    loss's metrics, losses, expert counts; the copy is started, not awaited."""
    if result is None:
        return torch.empty(0)
    first = [result.without_gradient, result.grad_norm.view(1), result.graphed]
    numbers = torch.cat([*first, result.loss_metrics, result.losses, *result.experts]).double()
    if numbers.device.type != "cuda":
        return numbers
    host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    return host.copy_(numbers, non_blocking=True)


class _Meter:
    """Makes metrics from finished steps; a step's time includes waiting for its data.

    names: of the loss's metrics. elapsed_s: of the last step that was read.
    """

    def __init__(
        self,
        flops: Callable[[list[int]], int],
        machine: Machine,
        graphs: GraphedLayers | None,
        names: Sequence[str],
    ) -> None:
        self.names = names
        self.flops = flops
        self.machine = machine
        self.graphs = graphs
        self.elapsed_s = 0.0

    def read(self, done: _QueuedStep) -> StepReport:
        done.end.wait()
        experts = _experts(done)
        losses = len(done.numbers) - sum(map(len, experts))
        values = iter(done.numbers[1:losses].tolist())
        norm = next(values, None)
        ways = GRAPH_WAYS if self.graphs and done.result else ()
        graphed: dict[str, int] = {way: int(next(values)) for way in ways}
        own = {name: _finite(value) for name, value in zip(self.names, values, strict=False)}
        loss, balance, index, *depths = [*values] or (None,) * 3
        self.elapsed_s = elapsed = done.end.since(done.begin)
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
            skipped=done.result is None,
            balance_loss=balance or None,
            index_loss=index or None,
            mtp_losses=tuple(depths) or None,
            loss_metrics=own or None,
            graphed=graphed or None,
            graph_gib=self.graphs.bytes / GIB if self.graphs else None,
        )
        return StepReport(step, metrics, _rounds(done), experts, _stages(done))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _experts(done: _QueuedStep) -> tuple[tuple[int, ...], ...]:
    if done.result is None or not done.result.experts:
        return ()
    sizes = [len(layer) for layer in done.result.experts]
    layers = done.numbers[-sum(sizes) :].long().split(sizes)
    return tuple(tuple(layer.tolist()) for layer in layers)


def _rounds(done: _QueuedStep) -> tuple[float, ...]:
    """Seconds that this rank worked on each round."""
    seconds = [0.0] * len(done.step.batches)
    for timed in done.result.rounds.times if done.result else ():
        seconds[timed.action.round] += timed.end.since(timed.begin)
    return tuple(seconds) if done.result else ()


def _stages(done: _QueuedStep) -> tuple[tuple[int, float, float], ...]:
    seconds: dict[int, dict[Kind, float]] = {}
    for timed in done.result.rounds.times if done.result else ():
        action = timed.action
        stage = seconds.setdefault(action.stage, {"forward": 0.0, "backward": 0.0})
        stage[action.kind] += timed.end.since(timed.begin)
    return tuple((n, each["forward"], each["backward"]) for n, each in sorted(seconds.items()))


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this rank: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
