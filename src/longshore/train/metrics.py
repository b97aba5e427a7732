"""The metrics of a step, and the file that keeps them: one JSON object per line.

In: StepMetrics. Out: metrics.jsonl. A number that is not finite or unknown is null:

    {"step": 1, "epoch": 0, "loss": 5.5407, …, "mfu": null, …, "skipped": false}

A run that was killed while writing leaves an incomplete last line, which is removed when the file
is next opened. A run that resumes from a checkpoint first removes the steps after it, and moves
unreadable lines to another file.
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from longshore.files import parse_json, reason, write_atomically

OPTIONAL = ("balance_loss", "index_loss", "mtp_losses", "loss_metrics", "graphed", "graph_gib")
"""Left out without experts, without mixers that have a loss of their own, without multi-token
prediction, with a loss that has no metrics, and without CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, over all ranks."""

    step: int
    """From 1."""
    epoch: float
    """From 0."""
    loss: float | None
    """The main loss, divided by its count; None for a skipped step."""
    loss_tokens: int
    """Labels that count in the main loss."""
    tokens: int
    """Real tokens, without padding."""
    sequences: int
    """Real sequences."""
    grad_norm: float | None
    """The global gradient norm before clipping."""
    lr: float
    """The learning rate of the update."""
    elapsed_s: float
    """Seconds of the step, waiting for data included."""
    tokens_per_s: float
    """Real tokens per second over all ranks."""
    tflops: float | None
    """TFLOP/s of one rank: products that a step has, without those that are recomputed."""
    mfu: float | None
    """Model FLOPs utilization: their fraction of the vendor's dense peak; None if it is unknown."""
    rounds: int
    """Rounds of the plan."""
    efficiency: float | None
    """Of the plan: the fraction of the lanes' time spent on real work, as estimated."""
    padding: float | None
    """Of the plan: the fraction of tokens that are padding."""
    plan_s: float | None
    """Seconds of planning."""
    data_wait_s: float | None
    """Seconds of waiting for data."""
    memory_gib: float | None
    """Peak memory of this rank."""
    skipped: bool
    """Whether the step had no loss token, so that nothing was updated."""
    balance_loss: float | None = None
    """The experts' balance loss."""
    index_loss: float | None = None
    """The mixers' own losses together: those of sparse attention's indexers."""
    mtp_losses: tuple[float, ...] | None = None
    """The loss of each depth of multi-token prediction."""
    loss_metrics: Mapping[str, float | None] | None = None
    """What the loss function returned beside its values, such as DPO's reward_margin."""
    graphed: Mapping[str, int] | None = None
    """Forward passes of layers on all lanes by what CUDA graphs replayed: whole, halves, eager."""
    graph_gib: float | None = None
    """Memory of this rank's graphs."""

    def as_dict(self) -> dict[str, Any]:
        """Every figure by its name; those that this model does not have are left out."""
        return {
            name: value for name, value in asdict(self).items() if name not in OPTIONAL or value
        }

    def to_json(self) -> str:
        values = {name: _finite(value) for name, value in self.as_dict().items()}
        return json.dumps(values, allow_nan=False)


def graphed_text(graphed: Mapping[str, int], graph_gib: float | None) -> str:
    """How graphs served the layers of some steps, in one line."""
    count = sum(graphed.values())
    names = {"whole": "as a whole", "halves": "by halves", "eager": "eagerly"}
    shares = [f"{graphed[way] / count:.0%} {name}" for way, name in names.items() if graphed[way]]
    memory = "" if graph_gib is None else f"; graphs take {graph_gib:.2f} GiB"
    return f"CUDA graphs: {count:,} layers ran {', '.join(shares)}{memory}"


class MetricsFile:
    """Appends steps to a file; each is handed to the operating system before `write` returns."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _cut_incomplete_line(self._file)

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
    """Writes a line in one call; path: of the open file, for the error."""
    line = (text + "\n").encode()
    try:
        written = os.write(file, line)
    except OSError as error:
        raise OSError(error.errno, reason(error), str(path)) from None
    if written < len(line):
        raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written", str(path))


def has_step(path: Path, step: int) -> bool:
    """Whether a file has a line of a step; all its lines can be read."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return any(parse_json(line)["step"] == step for line in lines)


def cut_steps(path: Path, last: int) -> list[str]:
    """Removes the lines of steps after `last` and an incomplete line: they will be written again.

    Unreadable lines go to PATH.unreadable; returns a warning about them.
    """
    if path.is_symlink():
        text = "it is a link, and a run writes only into its own folder"
        raise OSError(errno.ELOOP, text, str(path))
    if not path.exists():
        return []
    kept, broken = _spans(path, last)
    if broken:
        aside = path.with_name(f"{path.name}.unreadable")
        with aside.open("ab") as file:
            file.write(broken)
    if not broken and [start for start, _ in kept] in ([], [0]):
        os.truncate(path, kept[0][1] if kept else 0)  # the usual case, which needs no disk space
    else:
        with path.open("rb") as file:
            content = file.read()
        write_atomically(path, b"".join(content[start:stop] for start, stop in kept))
    count = broken.count(b"\n")
    text = f"warning: {path}: {count} unreadable line(s) were moved to {path.name}.unreadable"
    return [text] if broken else []


def _spans(path: Path, last: int) -> tuple[list[tuple[int, int]], bytes]:
    """The byte spans of the lines to keep, neighbours joined, and the unreadable lines."""
    kept: list[tuple[int, int]] = []
    broken, stop = bytearray(), 0
    with path.open("rb") as file:
        for line in file:
            start, stop = stop, stop + len(line)
            if not line.endswith(b"\n"):
                break
            try:
                is_kept = parse_json(line)["step"] <= last
            except (ValueError, LookupError, TypeError):
                broken += line
                continue
            if is_kept and kept and kept[-1][1] == start:
                kept[-1] = (kept[-1][0], stop)
            elif is_kept:
                kept.append((start, stop))
    return kept, bytes(broken)


def _finite(value: Any) -> Any:  # noqa: ANN401 - a number, or anything else
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_incomplete_line(file: int) -> None:
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
