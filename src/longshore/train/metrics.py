"""What a step measured, and the file that keeps it: one JSON object a line.

In: StepMetrics. Out: metrics.jsonl, in which a line is there whole or not at all. A number that is
not finite, or not known here, is null:

    {"step": 1, "epoch": 0, "loss": 5.5407, …, "mfu": null, …, "skipped": false}

A run that was killed while it wrote leaves half a line, which the next to open the file takes off;
one that goes on from a checkpoint first takes off the steps after that.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MAYBE = ("balance_loss", "mtp_losses")
"""Only models with experts, or with multi-token prediction, have these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, over all ranks.

    step: from 1. epoch: from 0. loss: the step's loss divided by its count. loss_tokens: labels
    that count. tokens, sequences: real ones. elapsed_s: seconds of this step. tflops: of one rank,
    a second. mfu: its share of the hardware's peak. rounds, efficiency, padding: of the plan.
    plan_s, data_wait_s: seconds for planning, and waiting for data. memory_gib: the most a rank
    held. skipped: whether the step had no loss token, so that nothing was updated. balance_loss: of
    experts. mtp_losses: of each depth.
    """

    step: int
    epoch: float
    loss: float | None
    loss_tokens: int
    tokens: int
    sequences: int
    grad_norm: float | None
    lr: float
    elapsed_s: float
    tokens_per_s: float
    tflops: float | None
    mfu: float | None
    rounds: int
    efficiency: float | None
    padding: float | None
    plan_s: float | None
    data_wait_s: float | None
    memory_gib: float | None
    skipped: bool
    balance_loss: float | None = None
    mtp_losses: tuple[float, ...] | None = None

    def to_json(self) -> str:
        known = {name: value for name, value in asdict(self).items() if name not in MAYBE or value}
        values = {name: _finite(value) for name, value in known.items()}
        return json.dumps(values, allow_nan=False)


class MetricsFile:
    """Appends steps to a file; each is with the system before `write` returns."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _cut_half_line(self._file)

    def write(self, metrics: StepMetrics) -> None:
        line = (metrics.to_json() + "\n").encode()
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"{self.path}: took {written} of {len(line)} bytes; is the disk full?")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The steps of a metrics file; half a line at its end is left out."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def cut_steps(path: str | Path, last: int) -> None:
    """Takes off the lines of steps after the last, and half a line: they will be written anew."""
    if not Path(path).exists():
        return
    with open(path, "r+b") as file:
        end = 0
        for line in file:
            try:
                goes_on = line.endswith(b"\n") and json.loads(line)["step"] <= last
            except (ValueError, LookupError, TypeError):
                goes_on = False
            if not goes_on:
                break
            end += len(line)
        file.truncate(end)


def _finite(value: Any) -> Any:  # noqa: ANN401 - a number, or what is none
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_half_line(file: int) -> None:
    size = os.fstat(file).st_size
    end = size
    while end:
        start = max(0, end - 4096)
        last = os.pread(file, end - start, start).rfind(b"\n")
        if last >= 0:
            end = start + last + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
