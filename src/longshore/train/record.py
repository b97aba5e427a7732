"""The record of a run: metrics, steps, evals and warnings as .jsonl, the display and the trackers.

In: StepReports and Evaluations, one after another, on rank 0; other ranks record nothing. Out: one
JSON object per line in each file. A run that resumes after step 40 first removes the lines of
steps 41, 42, … from the files.

    with recording(folder, display="auto", steps=100, after=0, is_first=True) as record:
        record.note("4 ranks on cpu")
        record.write(report)

steps.jsonl holds each step's plan and how long its rounds took, for the run's report; it stops
growing at MOST_BYTES. A pack is [first lane, CP size, indices of its sequences], and `experts`, for
models that have any, is the tokens routed to each expert, by MoE layer:

    {"step": 1, "lanes": 2, "capacity": 64, "sync": "round", "cost": {…}, "lengths": [7, 50],
     "rounds": [[[0, 2, [1]], [0, 1, [0]]]], "predicted_s": [0.11], "elapsed_s": [0.13]}

warnings.jsonl holds what users should know of a run when they look at its page, by the step after
which it was seen, 0 before the first: {"step": 12, "text": "the loss was above …"}.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from longshore.plan.types import Plan
from longshore.report.timeline import make_timeline
from longshore.train.checkpoint_files import writing
from longshore.train.display import make_display
from longshore.train.evaluation import Evaluation, as_line
from longshore.train.loop import StepReport
from longshore.train.metrics import MetricsFile, append_line, cut_steps
from longshore.train.trackers import make_trackers

MOST_BYTES = 256 << 20
EVALS = "evals.jsonl"


class StepsFile:
    """Appends steps to steps.jsonl until it has `most` bytes."""

    def __init__(self, path: str | Path, *, most: int = MOST_BYTES) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._left = most - os.fstat(self._file).st_size

    def write(self, report: StepReport) -> None:
        line = json.dumps(step_as_line(report), allow_nan=False)
        self._left -= len(line) + 1
        if self._left >= 0:
            append_line(self._file, line, self.path)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "StepsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def step_as_line(report: StepReport) -> dict[str, object]:
    plan = report.step.plan
    setting = plan.setting
    line: dict[str, object] = {
        "step": report.metrics.step,
        "lanes": setting.lanes,
        "capacity": setting.capacity,
        "sync": setting.sync,
        "cost": asdict(setting.profile),
        "lengths": [sequence.length for sequence in plan.sequences],
        "rounds": [
            [[pack.first_lane, pack.cp_size, list(pack.sequences)] for pack in round_.packs]
            for round_ in plan.rounds
        ],
        "predicted_s": round_costs(plan),
        "elapsed_s": list(report.rounds_s),
    }
    return {**line, "experts": report.experts} if report.experts else line


def round_costs(plan: Plan) -> list[float]:
    """Estimated seconds of each round: from the end of the previous one, on the latest lane."""
    ends = make_timeline(plan).end.max(axis=1).tolist()
    return [end - before for before, end in zip([0.0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Where a run reports to."""

    note: Callable[[str], None]
    """Shows a line, also after the last step."""
    write: Callable[[StepReport], None]
    """Records and shows a step."""
    evaluated: Callable[[int, Evaluation], None]
    """Records and shows an evaluation after a step."""
    phase: Callable[[str], None] = lambda text: None
    """Shows what happens now, before the first step."""
    warn: Callable[[int, str], None] = lambda step, text: None
    """Shows a warning after a step (0: before the first), and keeps it for the run's page."""


@contextmanager
def recording(
    folder: Path,
    *,
    display: str,
    trackers: Sequence[str] = (),
    steps: int,
    after: int,
    is_first: bool,
) -> Iterator[RunRecord]:
    if not is_first:
        yield RunRecord(lambda text: None, lambda report: None, lambda step, evaluation: None)
        return
    names = ("metrics.jsonl", "steps.jsonl", EVALS, "warnings.jsonl")
    metrics, plans, evals, warnings = files = [folder / name for name in names]
    with writing(folder):
        notes = [note for path in files for note in cut_steps(path, after)]
    view = make_display(display, steps, stream=sys.stdout, title=str(folder), done=after)
    sinks = make_trackers(trackers, folder, {"folder": str(folder)}, warn=view.note)
    with ExitStack() as opened:
        with writing(folder):
            metrics_file = opened.enter_context(MetricsFile(metrics))
            steps_file = opened.enter_context(StepsFile(plans))
        opened.enter_context(view)
        for note in notes:
            view.note(note)

        def write(report: StepReport) -> None:
            with writing(folder):
                metrics_file.write(report.metrics)
                steps_file.write(report)
            view.update(report.metrics)
            for tracker in sinks:
                tracker.log(report.metrics.step, asdict(report.metrics))

        def append(path: Path, line: dict[str, object]) -> None:
            with writing(folder), open(path, "a", encoding="utf-8") as out:
                out.write(json.dumps(line, allow_nan=False) + "\n")

        def warn(step: int, text: str) -> None:
            append(warnings, {"step": step, "text": text})
            view.note_on_step(f"warning: {text}")

        def evaluated(step: int, evaluation: Evaluation) -> None:
            append(evals, as_line(step, evaluation))
            loss = "none" if evaluation.loss is None else f"{evaluation.loss:.4f}"
            view.note_on_step(f"step {step}: {evaluation.name} loss {loss}")
            for tracker in sinks:
                tracker.log(step, {f"{evaluation.name}/loss": evaluation.loss})

        yield RunRecord(view.note, write, evaluated, view.phase, warn)
    for tracker in sinks:
        tracker.close()
