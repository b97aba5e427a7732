"""What a run writes and shows of its steps; rank 0 does, the others only take part.

In: Reports, one after the other. Out: metrics.jsonl, steps.jsonl and a display. A run that goes on
after step 40 first takes the lines of steps 41, 42, … off both files.

    with recording(folder, display="auto", steps=100, after=0, is_first=True) as record:
        record.note("4 ranks on cpu")
        record.write(report)
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from longshore.train.display import make_display
from longshore.train.journal import Journal
from longshore.train.loop import Report
from longshore.train.metrics import MetricsFile, cut_steps


@dataclass(frozen=True, slots=True)
class Record:
    """note: shows a line, also after the last step. write: keeps and shows a step."""

    note: Callable[[str], None]
    write: Callable[[Report], None]


@contextmanager
def recording(
    folder: Path, *, display: str, steps: int, after: int, is_first: bool
) -> Iterator[Record]:
    if not is_first:
        yield Record(lambda text: None, lambda report: None)
        return
    metrics, journal = folder / "metrics.jsonl", folder / "steps.jsonl"
    for path in (metrics, journal):
        cut_steps(path, after)
    shown = make_display(display, steps, stream=sys.stdout, title=str(folder))
    with MetricsFile(metrics) as file, Journal(journal) as lines, shown:

        def write(report: Report) -> None:
            file.write(report.metrics)
            lines.write(report)
            shown.update(report.metrics)

        yield Record(shown.note, write)
