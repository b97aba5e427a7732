"""steps.jsonl: what was planned in each step and how long its rounds took, for the page of a run.

In: Reports. Out: one JSON object a line, until the file has `most` bytes; a page draws from it.

    {"step": 1, "lanes": 2, "capacity": 64, "sync": "round", "cost": {…}, "lengths": [7, 50],
     "rounds": [[[0, 2, [1]], [0, 1, [0]]]], "predicted_s": [0.11], "elapsed_s": [0.13]}

A pack is [first lane, CP size, places of its sequences]. `experts`, only where there are any: the
tokens each expert got, by layer.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from longshore.plan.types import Plan
from longshore.report.timeline import make_timeline
from longshore.train.loop import Report
from longshore.train.metrics import append_line

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
