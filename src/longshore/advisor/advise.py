r"""`longshore advise`: the fastest way to run a model on some GPUs, and what it takes. No torch.

In: an AdviceTask. Out: Advice: the recommended candidate and the runners-up, each with its memory,
its planned steps and its times; and `answer`, the same as plain data: the recipe with a reason for
each key, which becomes JSON, and the text and page of advisor/advise_page.py.

    enumerate legal axes → estimate all → drop what does not fit → plan the best → the fastest

Estimates take lanes as even; the best of them are planned with the real planner on a sample of the
data's steps. A candidate within 2 % of the fastest wins if it is simpler: 1.00 s with tp 2 loses
against 1.01 s with tp 1. Nothing reads a clock, so the same question has the same answer. A part of
one:

    {"recipe": "[plan]\\ncapacity = 16384\\n…", "candidates": [{"tp": 1, "seconds": 5.4, …}],
     "reasons": [["plan.capacity", "16384", "the largest that fits: 32,768 would take 151.2 …"]]}
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from longshore.advisor.candidate_time import StepSize, StepTime, StepTimer
from longshore.advisor.candidates import (
    AdviceTask,
    Candidate,
    GpuMemory,
    MemoryCheck,
    all_candidates,
    cp_limits,
    memory_of,
    with_graphs,
)
from longshore.config.schema import ModelConfig, toml_value, write_toml
from longshore.data.source import Batches, BatchSize, Place
from longshore.plan.graph_use import choose_cap
from longshore.plan.types import Axes

PLANNED = 12
"""Candidates that are planned."""
OF_ONE_KIND = 2
"""Planned candidates with the same axes, at most."""
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
    """Most sequences of a micro-batch that CUDA graphs serve whole; 0 without graphs."""
    launch: tuple[float, float]
    """Seconds that device and host are busy in a full round without graphs."""

    @property
    def seconds(self) -> float:
        """Seconds of a step, the mean of those that were planned."""
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
    ranked.sort(key=lambda pair: (pair[1], *pair[0].complexity))
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
    counts: Counter[tuple[Axes, bool]] = Counter()
    for candidate, seconds in ranked:
        kind = replace(candidate.axes, vpp=1), candidate.recompute
        if counts[kind] < OF_ONE_KIND and memory.fits(candidate):
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


def _simplest_of_fastest(choices: list[Predicted]) -> Predicted:
    """The simplest of all that are within a few percent of the fastest."""
    limit = min(choice.seconds for choice in choices) * (1 + TIE)
    close = [choice for choice in choices if choice.seconds <= limit]
    return min(close, key=lambda choice: (choice.candidate.complexity, choice.seconds))


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
    usable = f"{task.usable / GIB:.1f} GiB of each of {task.gpus} GPUs (a tenth is kept free)"
    if not memory.least:
        return (
            f"no way to run this model on {task.gpus} GPUs holds its longest sequence of "
            f"{task.longest:,} tokens; use more GPUs, or shorten it"
        )
    least, needed = min(memory.least.values(), key=lambda row: row[1].total)
    parts = sorted(needed.parts().items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts[:4] if size)
    return (
        f"nothing fits into {usable}: the least is {needed.total / GIB:.1f} GiB with "
        f"{_words(least)} and a capacity of {least.capacity:,} tokens, so "
        f"{(needed.total - task.usable) / GIB:.1f} GiB are missing (in GiB: {shown}); use more or "
        "larger GPUs, a smaller model, or shorter sequences"
    )


def _words(candidate: Candidate) -> str:
    axes = candidate.axes
    sizes = {"tp": axes.tp, "pp": axes.pp, "vpp": axes.vpp, "ep": axes.ep}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words += [f"shard {axes.shard}", *(["recomputation"] if candidate.recompute else [])]
    return ", ".join(words)


Test = Callable[[Candidate], bool]


def reasons(advice: Advice) -> dict[str, tuple[object, str]]:
    """By key, in the order of a recipe."""
    best = advice.best.candidate
    axes = best.axes
    table: dict[str, tuple[object, str]] = {
        "plan.capacity": (best.capacity, _capacity(advice)),
        "plan.max_cp": (best.max_cp, _max_cp(advice)),
        "plan.sync": (best.sync, _sync(best)),
        "plan.cost": (advice.task.machine_name, "the times that this advice is made of"),
        "parallel.ranks": (advice.task.gpus, "one for each GPU"),
        "parallel.tp": (axes.tp, _axis(advice, "tp")),
        "parallel.pp": (axes.pp, _axis(advice, "pp")),
        "parallel.vpp": (axes.vpp, _axis(advice, "vpp")),
        "parallel.ep": (axes.ep, _axis(advice, "ep")),
        "parallel.shard": (axes.shard, _shard(advice)),
        "train.recompute": ("blocks" if best.recompute else "none", _recompute(advice)),
    }
    for key, size in (("parallel.vpp", axes.pp), ("parallel.ep", _most_ep(advice))):
        if size == 1:
            del table[key]
    if advice.task.model.code == "transformers":
        # What its modules keep for backward is not known: a run decides by upper bounds.
        del table["plan.capacity"], table["plan.max_cp"]
    return table | dict(_graph(advice))


def _most_ep(advice: Advice) -> int:
    return max(candidate.axes.ep for candidate, _ in advice.estimates)


def _size(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"


def _capacity(advice: Advice) -> str:
    task, best = advice.task, advice.best
    candidate = best.candidate
    double = replace(candidate, capacity=2 * candidate.capacity)
    needed = memory_of(task, double).total
    own = f"a full lane takes {_size(best.at_capacity)} of {_size(task.usable)}"
    if needed > task.usable:
        return f"{own}; {double.capacity:,} would take {_size(needed)}"
    if task.step_tokens <= candidate.axes.lanes * candidate.capacity:
        return f"{own}; a step has {task.step_tokens:,} tokens, so more would stay empty"
    return f"{own}; {double.capacity:,} would fit, and not be faster"


def _max_cp(advice: Advice) -> str:
    task, candidate = advice.task, advice.best.candidate
    least = -(-task.longest // candidate.capacity)
    longest = f"the longest sequence has {task.longest:,} tokens"
    if candidate.max_cp == 1:
        return f"{longest}, which one lane holds"
    if least > candidate.max_cp // 2:
        return f"{longest}, which fit into {candidate.max_cp} lanes and no fewer"
    if candidate.max_cp == candidate.axes.lanes:
        return f"{longest}; splitting it over all lanes balances them best"
    return f"{longest}; larger groups would gather more, and not be faster"


def _sync(candidate: Candidate) -> str:
    axes = candidate.axes
    if axes.lanes == 1:
        return "there is one lane, which waits for none"
    if candidate.sync == "step":
        return "nothing makes lanes wait for each other before the step's end"
    causes = {"zero3": axes.shard == "zero3", "experts": axes.ep > 1, "a pipeline": axes.pp > 1}
    whose = " and ".join(name for name, is_so in causes.items() if is_so)
    return f"lanes wait for each other in every round, because of {whose}"


def _axis(advice: Advice, name: str) -> str:
    """Against the best estimate with other values of this axis."""
    own = getattr(advice.best.candidate.axes, name)
    faster = _other(advice, lambda candidate: getattr(candidate.axes, name) != own)
    if faster is None:
        if any(getattr(candidate.axes, name) != own for candidate, _ in advice.estimates):
            return "no other size fits into memory"
        return "no other size is legal for this model and number of GPUs"
    candidate, seconds = faster
    return f"{name} {getattr(candidate.axes, name)} would be {_slower(advice, seconds)}"


def _slower(advice: Advice, seconds: float) -> str:
    """Estimates are compared with estimates."""
    share = seconds / advice.best.estimate - 1
    if abs(share) < 0.005:
        return "about as fast"
    return f"about {abs(share):.0%} {'slower' if share > 0 else 'faster before its plan'}"


def _other(advice: Advice, test: Test) -> tuple[Candidate, float] | None:
    """The fastest of those that fit and pass the test: as planned, or else as estimated."""
    for choice in advice.others:
        if test(choice.candidate):
            return choice.candidate, choice.seconds / advice.best.seconds * advice.best.estimate
    for candidate, seconds in advice.estimates:
        if test(candidate) and advice.memory.fits(candidate):
            return candidate, seconds
    return None


def _missing(advice: Advice, test: Test) -> int | None:
    """Bytes of the least that passes the test and does not fit."""
    rows = advice.memory.least.values()
    return min((memory.total for candidate, memory in rows if test(candidate)), default=None)


def _shard(advice: Advice) -> str:
    axes = advice.best.candidate.axes
    if axes.lanes == 1:
        return "there is one lane, which has the whole model"
    alike: Test = lambda c: (c.axes.tp, c.axes.pp, c.axes.ep) == (axes.tp, axes.pp, axes.ep)  # noqa: E731
    parts = advice.best.memory.peak
    model = parts.parameters + parts.gradients + parts.optimizer
    text = f"weights, gradients and moments take {_size(model)}"
    if axes.shard == "none":
        return f"{text}, so every lane can have them all"
    whole = _missing(advice, lambda c: alike(c) and c.axes.shard == "none")
    if whole is not None:
        return f"{text}; without sharding {_size(whole)} would be needed"
    return text


def _recompute(advice: Advice) -> str:
    best = advice.best.candidate
    other = _other(advice, lambda c: c.recompute != best.recompute and c.axes.tp == best.axes.tp)
    if best.recompute:
        without = _missing(advice, lambda c: not c.recompute)
        if other is None and without is not None:
            return f"without it at least {_size(without)} would be needed"
        return f"without it a step would be {_slower(advice, other[1])}" if other else "it fits"
    return f"with it a step would be {_slower(advice, other[1])}" if other else "all fits without"


def _graph(advice: Advice) -> Iterator[tuple[str, tuple[object, str]]]:
    best = advice.best
    if not best.candidate.graph:
        return
    device, host = (f"{seconds * 1e3:.0f} ms" for seconds in best.launch)
    text = f"the host needs {host} to launch a full round that takes the GPU {device}"
    yield "graph.layers", (["all"], text)
    share = "serves 95 % of the sampled micro-batches with one pack"
    yield "graph.max_sequences", (best.max_sequences, share)


DAY = 86_400
SHOWN = 8
"""Candidates, the recommended one first."""


def answer(advice: Advice, *, total_tokens: int) -> dict[str, Any]:
    """total_tokens: of the whole run."""
    task = advice.task
    why = reasons(advice)
    choices = (advice.best, *advice.others)[:SHOWN]
    return {
        "model": task.model.preset or task.model.from_hf or task.model.module,
        "layers": len(task.decoder.layers),
        "gpus": task.gpus,
        "gpu": task.machine_name,
        "machine": task.machine.device,
        "basis": task.machine.basis,
        "notes": notes(task),
        "memory_gib": task.memory / GIB,
        "room_gib": task.usable / GIB,
        "dtype": task.dtype,
        "sequences": len(task.lengths),
        "longest": task.longest,
        "batch": task.batch,
        "step_tokens": task.step_tokens,
        "total_tokens": total_tokens,
        "compared": len(advice.estimates),
        "recipe": recipe(advice, why),
        "reasons": [[key, toml_value(value), text] for key, (value, text) in why.items()],
        "candidates": [candidate_json(advice, each, total_tokens) for each in choices],
    }


def notes(task: AdviceTask) -> list[str]:
    """What is known of the prediction's limits, in sentences."""
    texts = []
    if task.decoder.lora is not None:
        texts.append(
            "LoRA: the base is frozen and has no gradients of weights; times of its products are "
            "measured, what freezing saves of them is arithmetic."
        )
    if task.model.code == "transformers":
        texts.append(
            "model.code=transformers: memory and times are those of Longshore's own code for a "
            "model of these sizes. transformers' modules keep more for backward and are slower, "
            "compiled Qwen3-0.6B by 5 %, without compilation by 46 %; so plan.capacity is left to "
            "the run. Measure a few steps before you trust the days."
        )
    return texts


def candidate_json(advice: Advice, choice: Predicted, total_tokens: int) -> dict[str, Any]:
    axes, speed = choice.candidate.axes, choice.tokens_per_second
    return {
        "tp": axes.tp,
        "pp": axes.pp,
        "vpp": axes.vpp,
        "ep": axes.ep,
        "lanes": axes.lanes,
        "shard": axes.shard,
        "sync": choice.candidate.sync,
        "recompute": choice.candidate.recompute,
        "capacity": choice.candidate.capacity,
        "max_cp": choice.candidate.max_cp,
        "graphs": choice.max_sequences,
        "memory": {name: size / GIB for name, size in choice.memory.parts().items()},
        "memory_gib": choice.memory.total / GIB,
        "tensors_gib": choice.memory.peak.total / GIB,
        "at_capacity_gib": choice.at_capacity / GIB,
        "moment": choice.memory.peak.moment,
        "seconds": choice.seconds,
        "tokens_per_s": speed,
        "mfu": advice.mfu(choice),
        "of_product": advice.of_product(choice),
        "days": total_tokens / speed / DAY,
        "rounds": max(len(step.plan.rounds) for step in choice.steps),
    }


def recipe(advice: Advice, why: Mapping[str, tuple[object, str]]) -> str:
    """A fragment that `longshore train` accepts, with the reasons beside the keys."""
    task = advice.task
    usual = ModelConfig()
    model = {
        each.name: value
        for each in fields(ModelConfig)
        if (value := getattr(task.model, each.name)) != getattr(usual, each.name)
    }
    sections: dict[str, dict[str, object]] = {"model": model, "data": {"batch": task.batch}}
    for key, (value, _) in why.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    sections.setdefault("train", {})["dtype"] = task.dtype
    return write_toml(sections, {key: text for key, (_, text) in why.items()})
