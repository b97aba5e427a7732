"""steps.jsonl: what was planned in each step and how long its rounds took, for the page of a run.

In: Reports. Out: one JSON object a line, until the file has `most` bytes; a page draws from it.

    {"step": 1, "lanes": 2, "capacity": 64, "sync": "round", "cost": {…}, "lengths": [7, 50],
     "rounds": [[[0, 2, [1]], [0, 1, [0]]]], "predicted_s": [0.11], "elapsed_s": [0.13]}

A pack is [first lane, CP size, places of its sequences]. `experts`, only where there are any: the
tokens each expert got, by layer.

What a run writes and shows of its steps; rank 0 does, the others only take part.

In: Reports and Evaluations, one after the other. Out: metrics.jsonl, steps.jsonl, evals.jsonl, a
display and trackers. A run that goes on after step 40 first takes the lines of steps 41, 42, … off
the files.

    with recording(folder, display="auto", steps=100, after=0, is_first=True) as record:
        record.note("4 ranks on cpu")
        record.write(report)
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
from longshore.train.disk import writing
from longshore.train.display import make_display
from longshore.train.evaluate import Evaluation, as_line
from longshore.train.loop import Report
from longshore.train.metrics import MetricsFile, append_line, cut_steps
from longshore.train.trackers import make_trackers

MOST_BYTES = 256 << 20


class Journal:
    """Appends steps to a file, and stops when it is full."""

    def __init__(self, path: str | Path, *, most: int = MOST_BYTES) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._left = most - os.fstat(self._file).st_size

    def write(self, report: Report) -> None:
        line = json.dumps(step_as_line(report), allow_nan=False)
        self._left -= len(line) + 1
        if self._left >= 0:
            append_line(self._file, line, self.path)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def step_as_line(report: Report) -> dict[str, object]:
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
    """Seconds from the end of the round before, on the latest lane, to that of each round."""
    ends = make_timeline(plan).end.max(axis=1).tolist()
    return [end - before for before, end in zip([0.0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Record:
    """note: shows a line, also after the last step. write: keeps and shows a step.

    evaluated: keeps and shows an evaluation after a step. phase: shows what happens now, before the
    first step.
    """

    note: Callable[[str], None]
    write: Callable[[Report], None]
    evaluated: Callable[[int, Evaluation], None]
    phase: Callable[[str], None] = lambda text: None


@contextmanager
def recording(
    folder: Path,
    *,
    display: str,
    trackers: Sequence[str] = (),
    steps: int,
    after: int,
    is_first: bool,
) -> Iterator[Record]:
    if not is_first:
        yield Record(lambda text: None, lambda report: None, lambda step, evaluation: None)
        return
    metrics, journal, evals = (folder / f"{name}.jsonl" for name in ("metrics", "steps", "evals"))
    with writing(folder):
        notes = [note for path in (metrics, journal, evals) for note in cut_steps(path, after)]
    shown = make_display(display, steps, stream=sys.stdout, title=str(folder), done=after)
    others = make_trackers(trackers, folder, {"folder": str(folder)}, warn=shown.note)
    with ExitStack() as opened:
        with writing(folder):
            file = opened.enter_context(MetricsFile(metrics))
            lines = opened.enter_context(Journal(journal))
        opened.enter_context(shown)
        for note in notes:
            shown.note(note)

        def write(report: Report) -> None:
            with writing(folder):
                file.write(report.metrics)
                lines.write(report)
            shown.update(report.metrics)
            for tracker in others:
                tracker.log(report.metrics.step, asdict(report.metrics))

        def evaluated(step: int, evaluation: Evaluation) -> None:
            line = as_line(step, evaluation)
            with writing(folder), open(evals, "a", encoding="utf-8") as out:
                out.write(json.dumps(line, allow_nan=False) + "\n")
            loss = "none" if evaluation.loss is None else f"{evaluation.loss:.4f}"
            shown.note_on_step(f"step {step}: {evaluation.name} loss {loss}")
            for tracker in others:
                tracker.log(step, {f"{evaluation.name}/loss": evaluation.loss})

        yield Record(shown.note, write, evaluated, shown.phase)
    for tracker in others:
        tracker.close()
