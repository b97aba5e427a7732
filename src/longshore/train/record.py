"""What a run writes and shows of its steps; rank 0 does, the others only take part.

In: Reports and Evaluations, one after the other. Out: metrics.jsonl, steps.jsonl, evals.jsonl, a
display and trackers. A run that goes on after step 40 first takes the lines of steps 41, 42, … off
the files.

    with recording(folder, display="auto", steps=100, after=0, is_first=True) as record:
        record.note("4 ranks on cpu")
        record.write(report)
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from longshore.train.disk import writing
from longshore.train.display import make_display
from longshore.train.evaluate import Evaluation, as_line
from longshore.train.journal import Journal
from longshore.train.loop import Report
from longshore.train.metrics import MetricsFile, cut_steps
from longshore.train.trackers import make_trackers


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
