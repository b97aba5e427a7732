"""What a run writes about each of its steps, in one place.

In: the report of each step. Out: metrics.jsonl, steps.jsonl and the display (train/record.py), the
times of pipeline stages, and what the refined cost profile learns. Once the first step has worked,
config.toml gets the settings of a resumed run: with train.steps 100 before and 200 now, it has 200
after step 101. With 40, where step 40 is done, they end the run, and config.toml has 40.

A loss that is far too high is warned about once: above 2·log V, twice that of a uniform guess over
V tokens, or for other losses than cross entropy above 1000 times its first value (of at least 1),
in three steps one after the other, or in the last step.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from longshore.ops.backends import kernels_line
from longshore.run.data import tokenizer_warnings
from longshore.run.job import TrainingJob
from longshore.run.parts import Parts
from longshore.run.resume import OpenRun, keep_settings
from longshore.train.display import graphed_text
from longshore.train.loop import StepReport
from longshore.train.record import RunRecord, refining, stage_times

NLL = ("", "cross_entropy")
"""Values of train.loss that are the negative log-likelihood of a token."""
MANY = 1000
STEPS = 3


class LossWatch:
    """Says once that a loss is far too high. vocab_size: of the model; loss: as train.loss has it.

    With 256 tokens, losses 5.6, 12, 12, 12 are told after the fourth: 2·log 256 is 11.09.
    """

    def __init__(self, loss: str, vocab_size: int) -> None:
        self._is_nll = loss in NLL
        self._vocab_size = vocab_size
        self._first: float | None = None
        self._last = (0, 0.0, 0.0)
        self._high = 0
        self._is_told = False

    def warning(self, step: int, loss: float | None, lr: float) -> str:
        """The warning after a step, or ""; loss: None for a skipped step."""
        if loss is not None:
            self._first = loss if self._first is None else self._first
            self._last = (step, loss, lr)
            self._high = self._high + 1 if loss > self._limit else 0
        return self._told() if self._high >= STEPS else ""

    def last_warning(self) -> str:
        """The warning after the last step, or ""."""
        return self._told() if self._high else ""

    @property
    def step(self) -> int:
        """The last step that had a loss."""
        return self._last[0]

    @property
    def _limit(self) -> float:
        if self._is_nll:
            return 2 * math.log(self._vocab_size)
        return MANY * max(1.0, abs(self._first or 0.0))

    def _told(self) -> str:
        if self._is_told:
            return ""
        self._is_told = True
        step, loss, lr = self._last
        limit = f"{MANY:,} times its first value"
        if self._is_nll:
            limit = f"twice that of a uniform guess over {self._vocab_size:,} tokens"
        return (
            f"the loss is {loss:,.6g} at step {step}, above {self._limit:,.4g}, {limit}; training "
            f"has probably diverged; begin again with a lower train.lr (now {lr:.3g}) or a longer "
            "train.warmup"
        )


class StepRecorder:
    """Writes each step. after: the steps done before; opened: closes what is opened here."""

    def __init__(
        self,
        job: TrainingJob,
        parts: Parts,
        run: OpenRun,
        *,
        record: RunRecord,
        after: int,
        opened: ExitStack,
    ) -> None:
        self.job = job
        self.parts = parts
        self.run = run
        self.record = record
        self.after = after
        self._opened = opened
        self._writers: tuple[Callable[[StepReport], None], ...] = ()
        self._graphed = Counter[str]()
        self._graph_gib: float | None = None
        self._loss_watch = LossWatch(job.config.train.loss, job.decoder.vocab_size)
        for text in tokenizer_warnings(job.config, job.source) if job.topology.rank == 0 else ():
            # A resumed run has it on its page already.
            record.note(text) if after else record.warn(0, text.removeprefix("warning: "))

    def write(self, report: StepReport) -> None:
        """A hook of the loop."""
        if not self._writers:
            self._begin()
        for write in self._writers:
            write(report)
        self._graphed.update(report.metrics.graphed or {})
        metrics = report.metrics
        self._graph_gib = metrics.graph_gib
        if text := self._loss_watch.warning(metrics.step, metrics.loss, metrics.lr):
            self.record.warn(metrics.step, text)

    def end(self) -> None:
        """After the last step. Where there was none, settings stay, unless they end the run."""
        if not self._writers and self.after >= self.job.steps:
            self._begin()
        if self._loss_watch.step == self.job.steps and (text := self._loss_watch.last_warning()):
            self.record.warn(self.job.steps, text)
        if self._graphed:
            self.record.note(graphed_text(self._graphed, self._graph_gib))

    def _begin(self) -> None:
        """The first step has worked, or none was left, so the run's settings may change."""
        job, run, note = self.job, self.run, self.record.note
        if job.topology.device.type == "cuda":
            note(f"kernels: {kernels_line()}")
        keep_settings(job.config, run, job.topology, step=self.after)
        stages = self._opened.enter_context(stage_times(run.folder, job.topology, after=self.after))
        refine = refining(run.folder, self.parts.refiner, job.topology, after=self.after, note=note)
        self._writers = (self.record.write, stages, refine)
