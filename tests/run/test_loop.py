"""The Trainer's loop: when the report of a step comes, at once on a CPU, on a GPU once the next
step is queued; and what happens around it."""

from types import SimpleNamespace

import pytest
import torch

from longshore.arch.presets import preset
from longshore.config.load import load_config
from longshore.data.source import Place
from longshore.data.steps import Step
from longshore.parallel.pipeline import Timestamp
from longshore.plan import make_plan
from longshore.run import trainer
from longshore.run.trainer import Trainer, warmup_steps
from longshore.train import step
from longshore.train.losses import make_loss
from longshore.train.step import RoundResults, StepResult
from longshore.train.supervision import RunError

PLAN = make_plan([5, 3], lanes=1, capacity=8)
CONFIG = load_config(None, [])
DECODER = preset("tiny-qwen3")


def each_step():
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


class Loop(Trainer):
    """The loop alone, with what it calls written down in `seen`; `stepper` is not a real one.

    stop: the event during which this rank is asked to stop.
    """

    def __init__(self, stepper, *, steps, device="cpu", loader=None, done=0, evaluated=(), stop=""):
        self.seen, self.evaluated, self.stop = stepper.seen, evaluated, stop
        stepper.topology = SimpleNamespace(device=torch.device(device), world_size=1)
        self._job = SimpleNamespace(
            steps=steps,
            topology=stepper.topology,
            decoder=DECODER,
            resolved=SimpleNamespace(config=CONFIG),
            config=CONFIG,
        )
        self._parts = SimpleNamespace(
            stepper=stepper,
            loader=each_step() if loader is None else loader,
            any_rank=list,
            checkpoints=SimpleNamespace(confirm=lambda n: self.seen.append(f"confirmed {n}")),
        )
        self._done = self._updates = done
        self._elapsed_s, self._evaluated_step, self._peak_flops = 0.0, 0, None
        self._reads_all = False
        self._run = SimpleNamespace(folder=None)

    def _wants_stop(self):
        return self.stop in self.seen

    def _show_phase(self, name):
        self.seen.append(name)

    def _is_evaluated(self, step):
        return step in self.evaluated

    def _write(self, report):
        self.seen.append(f"report {report.metrics.step}")

    def _after_step(self, queued):
        self._done = queued.number
        self.seen.append(f"after {self._done}")


def run(monkeypatch, device, *, count=4, evaluated=(), stop="", **choices):
    """What happened, in its order."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(trainer, "Timestamp", lambda _: Timestamp(cpu))
    monkeypatch.setattr(trainer, "explain", lambda *args: "")
    monkeypatch.setattr(step, "Timestamp", lambda _: Timestamp(cpu))
    monkeypatch.setattr(step, "peak_memory", lambda _: 0)
    seen = []
    loop = Loop(
        Stepper(seen, **choices), steps=count, device=device, evaluated=evaluated, stop=stop
    )
    try:
        for report in loop._train():
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

    loader = (drawn.append(step.place.step) or step for step in each_step())
    loop = Loop(Stepper([]), steps=9, loader=loader)
    loop._parts.any_rank = any_rank
    reports = loop._train()
    assert [report.metrics.step for report in reports] == [1, 2]
    assert drawn == [0, 1]
    assert [flags[0] for flags in asked] == [False] * 3


def test_a_gpu_with_slow_steps_queues_none_ahead(monkeypatch):
    """What is queued cannot be stopped; a second that the host waits does not show there."""
    monkeypatch.setattr(trainer, "SLOW_S", 0.0)
    assert run(monkeypatch, "cuda", count=9, stop="report 2")[-2:] == ["confirmed 2", "yields 2"]


def test_a_loss_that_is_not_finite_is_never_confirmed(monkeypatch):
    for device in ("cpu", "cuda"):
        seen = run(monkeypatch, device, bad=2)
        assert seen[-1] == "step 2: the loss is nan and the gradient norm 1.0"
        assert "confirmed 2" not in seen


def test_a_run_that_is_finished_asks_for_no_step():
    assert list(Loop(Stepper([]), steps=3, done=3)._train()) == []


def test_metrics_say_what_graphs_replayed():
    """Not what the plan would allow: a recording may fail, or exceed the limit on memory."""
    (report,) = Loop(Stepper([], graphed=(0.0, 6.0, 2.0)), steps=1)._train()
    metrics = report.metrics
    assert metrics.graphed == {"whole": 0, "halves": 6, "eager": 2}
    assert (metrics.graph_gib, metrics.loss, metrics.grad_norm) == (0.5, 2.0, 1.0)


def test_a_warmup_below_one_is_a_share_of_the_steps():
    given = ((0, 50), (1, 50), (7, 50), (0.03, 100), (0.07, 100), (0.03, 10), (0.5, 1))
    assert [warmup_steps(warmup, steps) for warmup, steps in given] == [0, 1, 7, 3, 7, 1, 1]


@pytest.mark.parametrize(
    ("device", "compiles", "shown"),
    [
        ("cpu", False, "first step…"),
        ("cpu", True, "first step (compiling)…"),
        ("cuda", False, "first step (compiling kernels)…"),
        ("cuda", True, "first step (compiling kernels)…"),
    ],
)
def test_the_first_step_says_why_it_is_slow(device, compiles, shown):
    loop = Loop(Stepper([]), steps=1, device=device)
    loop._job.resolved = SimpleNamespace(compile=compiles)
    lines = []
    loop._record = SimpleNamespace(phase=lines.append)
    Trainer._show_phase(loop, "first step")
    Trainer._show_phase(loop, "planning")
    assert lines == [shown, "planning…"]
