"""Reads the folder of a run: its configuration, metrics, evaluations, warnings, steps and more.

In: a folder. Out: a RunFolder with one array for each metric, NaN where a step has none. The lines

    {"step": 1, "loss": 5.5, …}
    {"step": 2, "loss": 4.0, …}
    {"step": 2, "loss": 3.9, …}

of a run that was resumed give step [1, 2] and loss [5.5, 3.9]: the later line counts. An incomplete
last line, which a killed run leaves, is ignored; any other broken line is a ValueError.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.report.run_journal import MOST_NUMBER, JournalSteps, read_journal
from longshore.report.run_pipeline import RankSteps, read_pipeline
from longshore.report.run_refine import RefineLine, read_refined

Floats = NDArray[np.float64]

METRICS = (
    "loss",
    "balance_loss",
    "index_loss",
    "grad_norm",
    "lr",
    "tokens",
    "sequences",
    "loss_tokens",
    "epoch",
    "elapsed_s",
    "tokens_per_s",
    "tflops",
    "mfu",
    "rounds",
    "efficiency",
    "padding",
    "plan_s",
    "data_wait_s",
    "memory_gib",
    "graph_gib",
    "skipped",
)
GRAPHED = ("whole", "halves", "eager")
"""The numbers of `graphed`, which become graphed_whole and so on."""


@dataclass(frozen=True, slots=True, eq=False)
class RunFolder:
    """The content of a run's folder."""

    name: str
    """The folder's name."""
    folder: Path
    """As given by the user."""
    config: Mapping[str, object]
    """By section.key."""
    metrics: Mapping[str, Floats]
    """An array for "step" and each metric, sorted by step; depths of multi-token prediction are
    depth_1, depth_2, …, and metrics of the loss function own_NAME."""
    evals: Mapping[str, list[tuple[int, float]]]
    """(step, loss) by the held-out set's name."""
    warnings: list[tuple[int, str]]
    """What users should know of the run, by the step after which it was seen."""
    journal: JournalSteps
    """The plans and the times of the rounds, from steps.jsonl."""
    pipeline: Mapping[int, RankSteps]
    """The times of the stages by pipeline rank, from pipeline/rank-0.jsonl and so on."""
    refined: Mapping[int, RefineLine]
    """What windows of steps said about the cost profile, by the first step planned with it."""

    @property
    def steps(self) -> Floats:
        return self.metrics["step"]


def read_run(folder: str | Path) -> RunFolder:
    """Everything of a run but its weights; raises ValueError for a folder without steps."""
    path = Path(folder)
    if not path.is_dir():
        what = "a file" if path.exists() else "missing"
        raise ValueError(f"{folder} is {what}; name the folder of a run, such as runs/demo-1")
    return RunFolder(
        name=path.resolve().name,
        folder=path,
        config=read_config(path / "config.toml"),
        metrics=read_metrics(path / "metrics.jsonl"),
        evals=read_evals(path / "evals.jsonl"),
        warnings=read_warnings(path / "warnings.jsonl"),
        journal=read_journal(path / "steps.jsonl"),
        pipeline=read_pipeline(path / "pipeline"),
        refined=read_refined(path / "refine.jsonl"),
    )


def read_config(path: Path) -> dict[str, object]:
    """Values by section.key; without the file, none."""
    if not path.is_file():
        return {}
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not TOML ({error})") from None
    return dict(_flat(sections, ""))


def read_metrics(path: Path) -> dict[str, Floats]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: it is not a run, or has no step yet")
    rows: dict[int, dict[str, float]] = {}
    for where, line in read_lines(path):
        rows[_integer(line, "step", where)] = _numbers(line, where)
    if not rows:
        raise ValueError(f"{path} has no step yet; wait for the first step to end")
    steps = sorted(rows)
    own = dict.fromkeys(name for row in rows.values() for name in row if name.startswith("own_"))
    names = [*METRICS, *(f"graphed_{way}" for way in GRAPHED), *_depths(rows.values()), *own]
    columns = {name: [rows[step].get(name, math.nan) for step in steps] for name in names}
    return {name: np.array(values) for name, values in {"step": steps, **columns}.items()}


def read_evals(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of each evaluation by name; of two lines for a step the later counts."""
    if not path.is_file():
        return {}
    by_name: dict[str, dict[int, float]] = {}
    for where, line in read_lines(path):
        loss = _number(line.get("loss"), f"{where}: loss")
        name = str(line.get("name", "held-out"))
        by_name.setdefault(name, {})[_integer(line, "step", where)] = loss
    return {
        name: [(step, loss) for step, loss in sorted(losses.items()) if math.isfinite(loss)]
        for name, losses in by_name.items()
    }


def read_warnings(path: Path) -> list[tuple[int, str]]:
    """(step, text) of each warning, once: a run that resumes may give it again."""
    if not path.is_file():
        return []
    lines = [
        (_integer(line, "step", where), str(line.get("text", "")))
        for where, line in read_lines(path)
    ]
    return sorted(dict.fromkeys(lines))


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each complete line, with "file, line n" for error messages."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                where = f"{path}, line {number}"
                yield where, parse_line(line, where)


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: is not a JSON object; delete the line to continue without it")
    return value


def _numbers(line: Mapping[str, Any], where: str) -> dict[str, float]:
    depths = line.get("mtp_losses") or ()
    if not isinstance(depths, list | tuple):
        raise ValueError(f"{where}: mtp_losses is {depths!r}; it must be a list")
    graphed = line.get("graphed") or {}
    if not isinstance(graphed, dict):
        raise ValueError(f"{where}: graphed is {graphed!r}; it must be an object")
    own = line.get("loss_metrics") or {}
    if not isinstance(own, dict):
        raise ValueError(f"{where}: loss_metrics is {own!r}; it must be an object")
    values = {name: line.get(name) for name in METRICS}
    values |= {f"own_{name}": value for name, value in own.items()}
    values |= {f"graphed_{way}": graphed.get(way) for way in GRAPHED}
    values |= {f"depth_{depth}": loss for depth, loss in enumerate(depths, start=1)}
    return {
        name: _number(value, f"{where}: {name}")
        for name, value in values.items()
        if value is not None
    }


def _number(value: object, where: str) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value) if isinstance(value, int | float) else None
    except OverflowError:
        number = None
    if number is None:
        raise ValueError(f"{where} is {value!r}; it must be a number or null")
    return number if math.isfinite(number) else math.nan


def _integer(line: Mapping[str, Any], key: str, where: str) -> int:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_NUMBER:
        raise ValueError(
            f"{where}: {key} is {value!r}; it must be a whole number from 0 to {MOST_NUMBER}"
        )
    return value


def _depths(rows: Any) -> list[str]:  # noqa: ANN401 - a view of dictionaries
    depths = {name for row in rows for name in row if name.startswith("depth_")}
    return sorted(depths, key=lambda name: int(name.removeprefix("depth_")))


def _flat(table: Mapping[str, Any], before: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value
