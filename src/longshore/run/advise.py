"""`longshore advise`: the fastest way to run a model on some GPUs, and what it takes. No torch.

In: an AdviceTask. Out: Advice: the recommended candidate and the runners-up, each with its memory,
its planned steps and its times.

    enumerate legal axes → estimate all → drop what does not fit → plan the best → the fastest

Estimates take lanes as even; the best of them are planned with the real planner on a sample of the
data's steps. A candidate within 2 % of the fastest wins if it is simpler: 1.00 s with tp 2 loses
against 1.01 s with tp 1. Nothing reads a clock, so the same question has the same answer.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from longshore.data.batches import Batches, BatchSize, Place
from longshore.plan.graph_use import choose_cap
from longshore.run.advise_candidates import (
    AdviceTask,
    Candidate,
    GpuMemory,
    MemoryCheck,
    ModelAxes,
    all_candidates,
    cp_limits,
    memory_of,
    with_graphs,
)
from longshore.run.advise_time import StepSize, StepTime, StepTimer

PLANNED = 12
"""Candidates that are planned."""
OF_ONE_KIND = 2
"""Of them, with the same axes."""
STEPS = 2
"""Planned for each of them, the same for all."""
SAMPLE = 2048
"""Most sequences of a planned step; a larger step is scaled up."""
TIE = 0.02
COVERAGE = 0.95
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A candidate with what is predicted of it."""

    candidate: Candidate
    """The way to run."""
    memory: GpuMemory
    """With the fullest round of the planned steps."""
    at_capacity: int
    """Bytes with a full lane: what must fit."""
    steps: tuple[StepTime, ...]
    """Those that were planned."""
    estimate: float
    """Seconds of a step without a plan."""
    max_sequences: int
    """Of a micro-batch that CUDA graphs serve whole; 0 without graphs."""
    launch: tuple[float, float]
    """Seconds that device and host are busy in a full round without graphs."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        return sum(step.tokens for step in self.steps) / sum(step.seconds for step in self.steps)

    @property
    def flops_per_second(self) -> float:
        return sum(step.flops for step in self.steps) / sum(step.seconds for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer."""

    task: AdviceTask
    """The question."""
    best: Predicted
    """Recommended."""
    others: tuple[Predicted, ...]
    """The runners-up, fastest first."""
    estimates: tuple[tuple[Candidate, float], ...]
    """Seconds of a step of every legal candidate, whether it fits or not; fastest first."""
    memory: MemoryCheck
    """Whether they fit."""

    def mfu(self, choice: Predicted) -> float | None:
        """The share of the vendor's dense peak; None where that is not known."""
        peak = self.task.machine.peak
        return choice.flops_per_second / self.task.gpus / peak if peak else None

    def of_product(self, choice: Predicted) -> float:
        """The share of the rate of the machine's fastest product."""
        return choice.flops_per_second / self.task.gpus * self.task.machine.products.flop


def advise(task: AdviceTask) -> Advice:
    """The fastest way that fits, or a ValueError that says what is missing."""
    timer, memory = StepTimer(task), MemoryCheck(task)
    samples = list(sample_steps(task, STEPS))
    size = StepSize.of(samples[0][0])
    whole = samples[0][1] / size.tokens
    ranked = [(each, timer.estimate(each, size) * whole) for each in _with_graphs(timer)]
    ranked.sort(key=lambda pair: (pair[1], *_simplicity(pair[0])))
    few = list(_few_of_each_kind(ranked, memory))
    if not few:
        raise ValueError(nothing_fits(task, memory))
    choices = [_choice(timer, each, seconds, samples) for each, seconds in few]
    best = _simplest_of_fastest(choices)
    best = _with_smallest_groups(timer, best, samples)
    others = sorted(
        (choice for choice in choices if choice.candidate != best.candidate),
        key=lambda choice: choice.seconds,
    )
    return Advice(
        task=task,
        best=best,
        others=tuple(others),
        estimates=tuple(ranked),
        memory=memory,
    )


def _with_graphs(timer: StepTimer) -> Iterator[Candidate]:
    """All candidates, and where the host is slower than the GPU once more with CUDA graphs."""
    for candidate in all_candidates(timer.task):
        yield candidate
        if timer.is_host_bound(candidate):
            graphed = with_graphs(timer.task, candidate)
            if graphed is not None:
                yield graphed


def sample_steps(task: AdviceTask, count: int) -> Iterator[tuple[list[int], int]]:
    """The lengths of some steps, as training shuffles them, and the tokens of the whole step."""
    batches = Batches(task.lengths, BatchSize("sequences", task.batch), seed=0, shuffle=True)
    for number in range(min(count, batches.steps(0))):
        _, places = next(batches.from_place(Place(0, number)))
        lengths = task.lengths[places].tolist()
        yield lengths[:SAMPLE], sum(lengths)


def _few_of_each_kind(
    ranked: list[tuple[Candidate, float]], memory: MemoryCheck
) -> Iterator[tuple[Candidate, float]]:
    """The best estimates that fit, of each kind of axes a few: they share an estimate's error."""
    counts: Counter[ModelAxes] = Counter()
    for candidate, seconds in ranked:
        kind = replace(candidate.axes, vpp=1)
        if counts[kind] < OF_ONE_KIND and memory.fitting(candidate) is not None:
            counts[kind] += 1
            yield candidate, seconds
        if counts.total() == PLANNED:
            return


def _choice(
    timer: StepTimer, candidate: Candidate, estimate: float, samples: list[tuple[list[int], int]]
) -> Predicted:
    steps = tuple(timer.planned(candidate, lengths, of=tokens) for lengths, tokens in samples)
    plans = [step.plan for step in steps]
    busy = timer.launched(candidate)
    return Predicted(
        candidate=candidate,
        memory=memory_of(timer.task, candidate, plans),
        at_capacity=memory_of(timer.task, candidate).total,
        steps=steps,
        estimate=estimate,
        max_sequences=choose_cap(plans, COVERAGE) if candidate.graph else 0,
        launch=(busy.device, busy.host),
    )


def _simplicity(candidate: Candidate) -> tuple[object, ...]:
    used, *sizes = candidate.axes.complexity
    return (used + candidate.graph, *sizes, candidate.max_cp, candidate.capacity)


def _simplest_of_fastest(choices: list[Predicted]) -> Predicted:
    """Of all that are within a few percent of the fastest."""
    limit = min(choice.seconds for choice in choices) * (1 + TIE)
    close = [choice for choice in choices if choice.seconds <= limit]
    return min(close, key=lambda choice: (_simplicity(choice.candidate), choice.seconds))


def _with_smallest_groups(
    timer: StepTimer, best: Predicted, samples: list[tuple[list[int], int]]
) -> Predicted:
    """The smallest limit of the CP size that is as fast: larger groups gather more."""
    candidate, limit = best.candidate, best.seconds * (1 + TIE)
    least = cp_limits(timer.task, candidate.axes, candidate.capacity)[0]
    sizes = [size for size in (1 << bit for bit in range(20)) if least <= size < candidate.max_cp]
    for size in reversed(sizes):
        smaller = replace(candidate, max_cp=size)
        choice = _choice(timer, smaller, best.estimate, samples)
        if choice.seconds > limit:
            break
        best = choice
    return best


def nothing_fits(task: AdviceTask, memory: MemoryCheck) -> str:
    """What is missing, and the way out."""
    room = f"{task.room / GIB:.1f} GiB of each of {task.gpus} GPUs (a tenth is kept free)"
    if not memory.least:
        return (
            f"no way to run this model on {task.gpus} GPUs holds its longest sequence of "
            f"{task.longest:,} tokens; use more GPUs, or shorten it"
        )
    least = min(memory.least.values(), key=lambda row: row.memory.total)
    axes, needed = least.candidate.axes, least.memory
    parts = sorted(needed.parts().items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts[:4] if size)
    return (
        f"nothing fits into {room}: the least is {needed.total / GIB:.1f} GiB with {_words(axes)} "
        f"and a capacity of {least.candidate.capacity:,} tokens, so "
        f"{(needed.total - task.room) / GIB:.1f} GiB are missing (in GiB: {shown}); use more or "
        "larger GPUs, a smaller model, or shorter sequences"
    )


def _words(axes: ModelAxes) -> str:
    sizes = {"tp": axes.tp, "pp": axes.pp, "vpp": axes.vpp, "ep": axes.ep}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join(
        [*words, f"shard {axes.shard}", *(["recomputation"] if axes.recompute else [])]
    )
