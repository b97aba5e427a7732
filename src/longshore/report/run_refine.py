"""What plan.refine did to a run's cost profile: ratios of each kind of round, factors of changes.

In: RUN/refine.jsonl, as train/refine_record.py writes it. Out: for each kind of round (its largest
CP size) measured / predicted seconds over steps, under the profile that the run began with and
under the refined one, and a row for each of the last changes. From

    {"step": 21, "window": [5, 16], "changed": true, …, "kinds": [[4, 12, 1.8, 1.8, 1.14]]}
    {"step": 37, "window": [17, 32], "changed": true, …, "kinds": [[4, 10, 1.6, 1.05, 1.03]]}

kind 4 has the ratios 1.8 and 1.6 at steps 16 and 32, refined 1.8 and 1.05: each under the profile
before the correction that follows from these very steps. A missing file has no lines.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longshore.report.page_data import Json
from longshore.report.run_curves import MOST_POINTS, edges, rounded
from longshore.report.run_journal import MOST_NUMBER

MOST_ROWS = 12


@dataclass(frozen=True, slots=True)
class RefineLine:
    """What a window of steps said about the profile."""

    window: tuple[int, int]
    """The first and the last of these steps."""
    changed: bool
    """Whether the profile was changed."""
    rounds: int
    """Rounds that it follows from."""
    left_out: int
    """Rounds that were left out."""
    factors: Mapping[str, float]
    """Of each part of the profile, relative to the first profile."""
    errors: tuple[float, float, float]
    """The typical error of a round under the first profile, before and after."""
    kinds: Mapping[int, tuple[float, float, float]]
    """By largest CP size, measured / predicted in the same order."""


def read_refined(path: Path) -> dict[int, RefineLine]:
    """By the first step planned with it; of two lines for a step the later counts."""
    lines: dict[int, RefineLine] = {}
    if path.is_file():
        with open(path, "rb") as file:
            for number, text in enumerate(file, start=1):
                if text.endswith(b"\n") and text.strip():
                    step, line = _read(text, f"{path}, line {number}")
                    lines[step] = line
    return {step: lines[step] for step in sorted(lines)}


def last_change(lines: Mapping[int, RefineLine]) -> int:
    """The first step planned with the last profile; 0 for a run with one profile."""
    return max((step for step, line in lines.items() if line.changed), default=0)


def refine_data(lines: Mapping[int, RefineLine]) -> Json | None:
    """Ratios of each kind and the last changes; None for a run that refined nothing."""
    if not lines:
        return None
    parts = list(dict.fromkeys(part for line in lines.values() for part in line.factors))
    changes = [(step, line) for step, line in lines.items() if line.changed]
    return {
        "parts": parts,
        "rows": [
            {
                "step": step,
                "window": list(line.window),
                "rounds": line.rounds,
                "left_out": line.left_out,
                "factors": rounded([line.factors.get(part, math.nan) for part in parts], 4),
                "errors": rounded(line.errors, 4),
            }
            for step, line in changes[-MOST_ROWS:]
        ],
        "kinds": [
            _kind(kind, list(lines.values()))
            for kind in sorted({kind for line in lines.values() for kind in line.kinds})
        ],
    }


def _kind(kind: int, lines: list[RefineLine]) -> Json:
    with_kind = [line for line in lines if kind in line.kinds]
    at = edges(len(with_kind), most=MOST_POINTS)[1:] - 1
    chosen = [with_kind[i] for i in at.tolist()]
    return {
        "kind": kind,
        "step": [line.window[1] for line in chosen],
        "first": rounded([line.kinds[kind][0] for line in chosen], 4),
        "before": rounded([line.kinds[kind][1] for line in chosen], 4),
    }


def _read(text: bytes, where: str) -> tuple[int, RefineLine]:
    try:
        data: dict[str, Any] = json.loads(text)
        first, last = (int(step) for step in data["window"])
        line = RefineLine(
            window=(first, last),
            changed=bool(data["changed"]),
            rounds=int(data["rounds"]),
            left_out=int(data["left_out"]),
            factors={str(name): float(value) for name, value in data["factors"].items()},
            errors=_three(data["errors"]),
            kinds={int(kind): _three(ratios) for kind, _, *ratios in data["kinds"]},
        )
        positive = [*line.factors.values(), *(r for three in line.kinds.values() for r in three)]
        if not all(0 < value < math.inf for value in positive):
            raise ValueError("a factor or ratio is not positive")
        if not 0 <= (step := int(data["step"])) <= MOST_NUMBER or last > MOST_NUMBER:
            raise ValueError(f"step {step}")
        return step, line
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError(
            f"{where}: is not what a refined profile leaves; delete the line to continue without it"
        ) from None


def _three(values: list[float]) -> tuple[float, float, float]:
    first, before, after = np.array(values, dtype=np.float64).tolist()
    return first, before, after
