"""Why each key of a recommended recipe has its value, in a sentence. No torch.

In: Advice. Out: for each key its value and the reason, which compares with what else was possible:

    plan.capacity    16384    the largest that fits: 32,768 would take 151.2 of 125.8 GiB
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from longshore.run.advise import GIB, Advice
from longshore.run.advise_candidates import Candidate, Fitting, ModelAxes, memory_of

Test = Callable[[Candidate], bool]


def reasons(advice: Advice) -> dict[str, tuple[object, str]]:
    """By key, in the order of a recipe."""
    best = advice.best
    axes = best.candidate.axes
    table: dict[str, tuple[object, str]] = {
        "plan.capacity": (best.candidate.capacity, _capacity(advice)),
        "plan.max_cp": (best.candidate.max_cp, _max_cp(advice)),
        "plan.sync": (axes.sync, _sync(axes)),
        "plan.cost": (advice.task.machine_name, "the times that this advice is made of"),
        "parallel.ranks": (advice.task.gpus, "one for each GPU"),
        "parallel.tp": (axes.tp, _axis(advice, "tp")),
        "parallel.pp": (axes.pp, _axis(advice, "pp")),
        "parallel.vpp": (axes.vpp, _axis(advice, "vpp")),
        "parallel.ep": (axes.ep, _axis(advice, "ep")),
        "parallel.shard": (axes.shard, _shard(advice)),
        "train.recompute": ("blocks" if axes.recompute else "none", _recompute(advice)),
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
    own = f"a full lane takes {_size(best.at_capacity)} of {_size(task.room)}"
    if needed > task.room:
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


def _sync(axes: ModelAxes) -> str:
    if axes.lanes == 1:
        return "there is one lane, which waits for none"
    if axes.sync == "step":
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
        if test(candidate) and advice.memory.fitting(candidate) is not None:
            return candidate, seconds
    return None


def _missing(advice: Advice, test: Test) -> Fitting | None:
    """The least that passes the test and does not fit."""
    rows = [row for row in advice.memory.least.values() if test(row.candidate)]
    return min(rows, key=lambda row: row.memory.total, default=None)


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
        return f"{text}; without sharding {_size(whole.memory.total)} would be needed"
    return text


def _recompute(advice: Advice) -> str:
    axes = advice.best.candidate.axes
    other = _other(
        advice,
        lambda c: c.axes.recompute != axes.recompute and c.axes.tp == axes.tp,
    )
    if axes.recompute:
        without = _missing(advice, lambda c: not c.axes.recompute)
        if other is None and without is not None:
            return f"without it at least {_size(without.memory.total)} would be needed"
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
