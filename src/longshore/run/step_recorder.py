"""What a run writes about each of its steps, in one place.

In: the report of each step. Out: metrics.jsonl, steps.jsonl and the display (train/record.py), the
times of pipeline stages, and what the refined cost profile learns. Once the first step has worked,
config.toml gets the settings of a resumed run: with train.steps 100 before and 200 now, it has 200
after step 101. With 40, where step 40 is done, they end the run, and config.toml has 40.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from longshore.ops.backends import kernels_line
from longshore.run.job import TrainingJob
from longshore.run.parts import Parts
from longshore.run.resume import OpenRun, keep_settings
from longshore.train.loop import StepReport
from longshore.train.metrics import graphed_text
from longshore.train.record import RunRecord
from longshore.train.refine_record import refining
from longshore.train.stage_times import stage_times


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

    def write(self, report: StepReport) -> None:
        """A hook of the loop."""
        if not self._writers:
            self._begin()
        for write in self._writers:
            write(report)
        self._graphed.update(report.metrics.graphed or {})
        self._graph_gib = report.metrics.graph_gib

    def end(self) -> None:
        """After the last step. Where there was none, settings stay, unless they end the run."""
        if not self._writers and self.after >= self.job.steps:
            self._begin()
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
