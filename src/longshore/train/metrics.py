"""What a step measured, and the file that keeps it: one JSON object a line.

In: StepMetrics. Out: metrics.jsonl, in which a line is there whole or not at all. A number that is
not finite, or not known here, is null:

    {"step": 1, "epoch": 0, "loss": 5.5407, …, "mfu": null, …, "skipped": false}

A run that was killed while it wrote leaves half a line, which the next to open the file takes off;
one that goes on from a checkpoint first takes off the steps after that, and puts lines that cannot
be read aside.
"""

import errno
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from longshore.files import reason, write_whole

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
        append_line(self._file, metrics.to_json(), self.path)

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


def append_line(file: int, text: str, path: Path) -> None:
    """Hands a line to the system, whole; path: of the open file, for the error."""
    line = (text + "\n").encode()
    try:
        written = os.write(file, line)
    except OSError as error:
        raise OSError(error.errno, reason(error), str(path)) from None
    if written < len(line):
        raise OSError(errno.ENOSPC, f"it took {written} of {len(line)} bytes", str(path))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The steps of a metrics file; half a line at its end is left out."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def cut_steps(path: Path, last: int) -> list[str]:
    """Takes off the lines of steps after the last, and half a line: they will be written anew.

    Lines that cannot be read go to PATH.unreadable; returns what to say of them.
    """
    if not path.exists():
        return []
    kept, broken = _spans(path, last)
    if broken:
        aside = path.with_name(f"{path.name}.unreadable")
        with aside.open("ab") as file:
            file.write(broken)
    if not broken and [start for start, _ in kept] in ([], [0]):
        os.truncate(path, kept[0][1] if kept else 0)  # the usual case, which takes no room
    else:
        with path.open("rb") as file:
            content = file.read()
        write_whole(path, b"".join(content[start:stop] for start, stop in kept))
    count = broken.count(b"\n")
    told = f"warning: {path}: lines that cannot be read ({count}) are now in {path.name}.unreadable"
    return [told] if broken else []


def _spans(path: Path, last: int) -> tuple[list[tuple[int, int]], bytes]:
    """Where the lines lie that stay, neighbours joined, and the lines that cannot be read."""
    kept: list[tuple[int, int]] = []
    broken, stop = bytearray(), 0
    with path.open("rb") as file:
        for line in file:
            start, stop = stop, stop + len(line)
            if not line.endswith(b"\n"):
                break
            try:
                stays = json.loads(line)["step"] <= last
            except (ValueError, LookupError, TypeError):
                broken += line
                continue
            if stays and kept and kept[-1][1] == start:
                kept[-1] = (kept[-1][0], stop)
            elif stays:
                kept.append((start, stop))
    return kept, bytes(broken)


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
