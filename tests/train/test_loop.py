"""When the report of a step comes: at once on a CPU; on a GPU once the next step is queued."""

from types import SimpleNamespace

import pytest
import torch

from longshore.data.batches import Place
from longshore.data.steps import Step
from longshore.parallel.pipeline import Timestamp
from longshore.plan import make_plan
from longshore.train import loop
from longshore.train.loop import Hooks, Machine, Progress
from longshore.train.loss import make_loss
from longshore.train.optimizer import Schedule
from longshore.train.step import RoundResults, StepResult
from longshore.train.stop import RunError

PLAN = make_plan([5, 3], lanes=1, capacity=8)
SCHEDULE = Schedule(kind="constant", lr=1.0, warmup=0, updates=9, min_lr=0.0)


def steps():
    batches = [SimpleNamespace(counts=SimpleNamespace(main=8, tokens=8, sequences=2))]
    for number in range(100):
        yield Step(PLAN, batches, Place(step=number))


class Stepper:
    """Says when it queues a step; `bad` has no finite loss."""

    def __init__(self, seen, *, bad=0, graphed=()):
        self.seen, self.bad, self.number = seen, bad, 0
        self.graphs = SimpleNamespace(bytes=2**29) if graphed else None
        self.graphed = torch.tensor(graphed, dtype=torch.float64)
        self.loss = make_loss()

    def step(self, batches, lr, *, plan):
        self.number += 1
        self.seen.append(f"queued {self.number}")
        loss = float("nan") if self.number == self.bad else 2.0
        losses = torch.tensor([loss, 0.0, 0.0], dtype=torch.float64)
        none, no = torch.empty(0), torch.zeros(1)
        rounds = RoundResults((), (), (), none)
        return StepResult(losses, torch.tensor(1.0), self.graphed, (), rounds, none, no)


def run(monkeypatch, device, *, count=4, evaluated=(), stop="", **choices):
    """What happened, in its order. stop: the event during which this rank is asked to stop."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(loop, "Timestamp", lambda _: Timestamp(cpu))
    monkeypatch.setattr(loop, "peak_memory", lambda _: 0)
    seen = []
    hooks = Hooks(
        wants_stop=lambda: stop in seen,
        phase=seen.append,
        wants_report=lambda step: step in evaluated,
        report=lambda report: seen.append(f"report {report.metrics.step}"),
        after_step=lambda done: seen.append(f"after {done.step}"),
        reported=lambda step: seen.append(f"confirmed {step}"),
    )
    reports = loop.train(
        Stepper(seen, **choices),
        steps(),
        steps=count,
        schedule=SCHEDULE,
        flops=lambda lengths: 1,
        machine=Machine(1, torch.device(device), None),
        hooks=hooks,
    )
    try:
        for report in reports:
            seen.append(f"yields {report.metrics.step}")
    except RunError as error:
        seen.append(str(error).partition(";")[0])
    return seen


def test_on_a_cpu_each_report_comes_before_anything_else(monkeypatch):
    seen = run(monkeypatch, "cpu", count=2)
    each = [
        [f"{what} {n}" for what in ("queued", "report", "after", "confirmed", "yields")]
        for n in (1, 2)
    ]
    assert seen == ["planning", "first step", *each[0], *each[1]]


def test_on_a_gpu_the_first_comes_at_once_and_others_when_the_next_is_queued(monkeypatch):
    assert run(monkeypatch, "cuda")[2:] == [
        *("queued 1", "report 1", "after 1", "confirmed 1", "yields 1"),
        *("queued 2", "after 2"),
        *("queued 3", "report 2", "confirmed 2", "after 3", "yields 2"),
        *("queued 4", "report 3", "confirmed 3", "after 4", "yields 3"),
        *("report 4", "confirmed 4", "yields 4"),
    ]


def test_the_report_of_a_step_that_is_evaluated_comes_before_its_evaluation(monkeypatch):
    seen = run(monkeypatch, "cuda", evaluated=(3,))
    assert seen[9:13] == ["queued 3", "report 2", "confirmed 2", "report 3"]
    assert seen[13:18] == ["after 3", "confirmed 3", "yields 2", "yields 3", "queued 4"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("stop", "last"),
    # Asked while step 2 is queued, and in the hooks after it; on a GPU "report 2" comes when step 3
    # is queued already.
    [("queued 2", 2), ("after 2", 2), ("report 2", {"cpu": 2, "cuda": 3})],
)
def test_the_step_that_runs_is_the_last_one(monkeypatch, device, stop, last):
    last = last[device] if isinstance(last, dict) else last
    seen = run(monkeypatch, device, count=9, stop=stop)
    assert [line for line in seen if "queued" in line] == [f"queued {n + 1}" for n in range(last)]
    assert seen[-2:] == [f"confirmed {last}", f"yields {last}"]


def test_a_stop_of_another_rank_is_heard_before_the_next_sequences_are_drawn(monkeypatch):
    """Else a resumed run would leave them out. Here another rank is asked in step 2."""
    asked, drawn = [], []

    def any_rank(flags):
        asked.append(flags)
        return [len(asked) > 2, *flags[1:]]

    reports = loop.train(
        Stepper([]),
        (drawn.append(step.place.step) or step for step in steps()),
        steps=9,
        schedule=SCHEDULE,
        flops=lambda lengths: 1,
        machine=Machine(1, torch.device("cpu"), None),
        hooks=Hooks(any_rank=any_rank),
    )
    assert [report.metrics.step for report in reports] == [1, 2]
    assert drawn == [0, 1]
    assert [flags[0] for flags in asked] == [False] * 3


def test_a_gpu_with_slow_steps_queues_none_ahead(monkeypatch):
    """What is queued cannot be stopped; a second that the host waits does not show there."""
    monkeypatch.setattr(loop, "SLOW_S", 0.0)
    assert run(monkeypatch, "cuda", count=9, stop="report 2")[-2:] == ["confirmed 2", "yields 2"]


def test_a_loss_that_is_not_finite_is_never_confirmed(monkeypatch):
    for device in ("cpu", "cuda"):
        seen = run(monkeypatch, device, bad=2)
        assert seen[-1] == "step 2: the loss is nan and the gradient norm 1.0"
        assert "confirmed 2" not in seen


def test_a_run_that_is_finished_asks_for_no_step(monkeypatch):
    reports = loop.train(
        Stepper([]),
        steps(),
        steps=3,
        schedule=SCHEDULE,
        flops=lambda lengths: 1,
        machine=Machine(1, torch.device("cpu"), None),
        start=Progress(3, 3),
    )
    assert list(reports) == []


def test_metrics_say_what_graphs_replayed(monkeypatch):
    """Not what the plan would allow: a recording may fail, or exceed the limit on memory."""
    monkeypatch.setattr(loop, "peak_memory", lambda _: 0)
    (report,) = loop.train(
        Stepper([], graphed=(0.0, 6.0, 2.0)),
        steps(),
        steps=1,
        schedule=SCHEDULE,
        flops=lambda lengths: 1,
        machine=Machine(1, torch.device("cpu"), None),
    )
    metrics = report.metrics
    assert metrics.graphed == {"whole": 0, "halves": 6, "eager": 2}
    assert (metrics.graph_gib, metrics.loss, metrics.grad_norm) == (0.5, 2.0, 1.0)
