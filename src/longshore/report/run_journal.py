"""steps.jsonl, whose times are kept in memory and whose plans are read on demand; and curves.

In: the file. Out: for each step the predicted and measured seconds of its rounds, the tokens of its
experts, and the position of its line, so that a few steps' plans can be read later:

    journal = read_journal(Path("runs/demo-1/steps.jsonl"))
    plan = journal.plan(1)

A run that was resumed has a step twice: the later line wins. A missing file has no steps. A curve
of thousands of steps has at most a thousand points, each the mean of neighbouring steps, with the
minimum and maximum where a point covers several, so that no spike is lost. Six steps in 3 points:

    edges(6, most=3) = [0, 2, 4, 6]
    curve([1, 3, 9, 1, 2, 2], [0, 2, 4, 6]) = {"y": [2, 5, 2], "low": [1, 1, 2], "high": [3, 9, 2]}
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import parse_profile
from longshore.plan.shapes import padded_length
from longshore.plan.types import (
    DEFAULT_POLICY,
    Pack,
    Plan,
    PlanSetting,
    Round,
    Sequence,
    Stats,
    policy_named,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_LANES = 1 << 20  # as `longshore plan` takes them
MOST_CELLS = 1 << 24  # rounds x lanes of one step, which a timeline holds in memory
MOST_NUMBER = 1 << 53

# steps.jsonl has no statistics of plans; they are in metrics.jsonl.
NO_STATS = Stats(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), 0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class JournalLine:
    """The line of one step."""

    number: int
    """The line's number in the file, from 1."""
    start: int
    """Where the line begins, in bytes."""
    size: int
    """Bytes of the line."""
    predicted: Floats
    """Seconds of each round."""
    elapsed: Floats
    """Measured seconds of each round; empty for a skipped step."""
    experts: tuple[Ints, ...]
    """Tokens of each expert, by layer."""

    @property
    def measured(self) -> bool:
        """Whether every round has a prediction above 0 and a time."""
        both = len(self.predicted) == len(self.elapsed) > 0
        return both and bool((self.predicted > 0).all() and (self.elapsed > 0).all())


@dataclass(frozen=True, slots=True, eq=False)
class JournalSteps:
    """The lines of a file by step, in ascending order."""

    path: Path
    lines: Mapping[int, JournalLine]

    def plan(self, step: int, *, policy: str = DEFAULT_POLICY) -> Plan:
        """The plan of a step; its policy is in the run's config, not in steps.jsonl."""
        line = self.lines[step]
        where = f"{self.path}, line {line.number}"
        with open(self.path, "rb") as file:
            file.seek(line.start)
            data = json.loads(file.read(line.size))
        try:
            return _plan(data, policy)
        except (KeyError, TypeError, IndexError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}: has no valid plan ({error!r}); delete the line") from None


def read_journal(path: Path) -> JournalSteps:
    lines: dict[int, JournalLine] = {}
    if path.is_file():
        start = 0
        with open(path, "rb") as file:
            for number, text in enumerate(file, start=1):
                if text.endswith(b"\n") and text.strip():
                    step, line = _read(text, f"{path}, line {number}", number=number, start=start)
                    lines[step] = line
                start += len(text)
    return JournalSteps(path, {step: lines[step] for step in sorted(lines)})


def _read(text: bytes, where: str, *, number: int, start: int) -> tuple[int, JournalLine]:
    try:
        data = json.loads(text)
        line = JournalLine(
            number=number,
            start=start,
            size=len(text),
            predicted=np.array(data["predicted_s"], dtype=np.float64),
            elapsed=np.array(data["elapsed_s"], dtype=np.float64),
            experts=tuple(np.array(layer, dtype=np.int64) for layer in data.get("experts") or ()),
        )
        if not 0 <= (step := int(data["step"])) <= MOST_NUMBER:
            raise ValueError(f"step {step}")
        return step, line
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError(
            f"{where}: is not a step; delete the line to continue without it"
        ) from None


def _plan(data: Mapping[str, Any], policy: str) -> Plan:
    lengths = [int(length) for length in data["lengths"]]
    charged = [max(lengths)] * len(lengths) if policy_named(policy).pads_to_longest else lengths
    rounds = tuple(Round(tuple(_pack(raw, charged) for raw in packs)) for packs in data["rounds"])
    if not lengths or not rounds:
        raise ValueError("no sequences or no rounds")
    lanes = int(data["lanes"])
    if not 1 <= lanes <= MOST_LANES or lanes * len(rounds) > MOST_CELLS:
        raise ValueError(
            f"{lanes} lanes and {len(rounds)} rounds; the limit is {MOST_LANES} lanes, and "
            f"{MOST_CELLS} for lanes times rounds"
        )
    if max(*lengths, int(data["capacity"])) > MOST_NUMBER:
        raise ValueError(f"a length or capacity above {MOST_NUMBER}")
    if any(pack.first_lane < 0 or pack.lanes[-1] >= lanes for r in rounds for pack in r.packs):
        raise ValueError(f"a pack is on a lane outside 0 to {lanes - 1}")
    setting = PlanSetting(
        lanes=lanes,
        capacity=int(data["capacity"]),
        policy=policy,
        sync=str(data["sync"]),
        cp_sizes=tuple(sorted({pack.cp_size for round_ in rounds for pack in round_.packs})),
        profile=parse_profile(data["cost"], "cost"),
        align=1,
        max_sequences=None,
        pp=1,
        vpp=1,
    )
    sequences = tuple(Sequence(i, length, length) for i, length in enumerate(lengths))
    return Plan(setting=setting, sequences=sequences, rounds=rounds, stats=NO_STATS, digest="")


def _pack(raw: Any, lengths: list[int]) -> Pack:  # noqa: ANN401 - raw JSON
    first_lane, cp_size, sequences = raw
    tokens = sum(padded_length(lengths[i], cp_size) // cp_size for i in sequences)
    return Pack(int(first_lane), int(cp_size), tuple(sequences), tokens)


Json = dict[str, Any]

MOST_POINTS = 1000
SHOWN = (
    *("loss", "balance_loss", "index_loss", "grad_norm", "lr", "tokens_per_s", "tflops", "mfu"),
    *("elapsed_s", "rounds", "efficiency", "padding", "plan_s", "data_wait_s", "memory_gib"),
)


def run_curves(metrics: Mapping[str, Floats], *, most: int = MOST_POINTS) -> Json:
    """Every metric that has a value, and the steps, tokens and seconds of its points.

    A point is at the last of its steps, with the tokens and seconds from the run's first step to
    the end of that one.
    """
    at = edges(len(metrics["step"]), most=most)
    last = at[1:] - 1
    others = [name for name in metrics if name.startswith(("depth_", "own_"))]
    known = [name for name in (*SHOWN, *others) if np.isfinite(metrics[name]).any()]
    return {
        "step": metrics["step"][last].astype(np.int64).tolist(),
        "first": int(metrics["step"][0]),
        "tokens": rounded(total(metrics["tokens"])[last], 9),
        "seconds": rounded(total(metrics["elapsed_s"])[last], 6),
        "curves": {name: curve(metrics[name], at) for name in known},
    }


def edges(count: int, *, most: int) -> Ints:
    """Divides `count` steps into at most `most` groups of almost the same size."""
    points = min(count, most)
    return np.arange(points + 1, dtype=np.int64) * count // points


def curve(values: Floats, at: Ints) -> Json:
    """Mean, minimum and maximum of each group; null where no step of it has a value."""
    if len(at) == len(values) + 1:
        return {"y": rounded(values)}
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.int64), at[:-1])
    sums = np.add.reduceat(np.where(known, values, 0.0), at[:-1])
    means = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    low, high = np.fmin.reduceat(values, at[:-1]), np.fmax.reduceat(values, at[:-1])
    return {"y": rounded(means), "low": rounded(low), "high": rounded(high)}


def total(values: Floats) -> Floats:
    """The cumulative sum; a step without a value adds nothing."""
    return np.cumsum(np.nan_to_num(values))


def rounded(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Values for JSON with this many significant digits; those that are not finite become None."""
    return [_rounded(float(value), digits) for value in values]


def _rounded(value: float, digits: int) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
