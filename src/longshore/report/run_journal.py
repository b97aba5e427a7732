"""steps.jsonl, which may be large: times are kept in memory, plans are read on demand.

In: the file. Out: for each step the predicted and measured seconds of its rounds, the tokens of its
experts, and the position of its line, so that a few steps' plans can be read later:

    journal = read_journal(Path("runs/demo-1/steps.jsonl"))
    plan = journal.plan(1)

A run that was resumed has a step twice: the later line wins. A missing file has no steps.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import parse_profile
from longshore.plan.policy import DEFAULT_POLICY, policy_named
from longshore.plan.shapes import padded_length
from longshore.plan.types import Pack, Plan, PlanSetting, Round, Sequence, Stats

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
    """Of the line in the file, from 1."""
    place: int
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
            file.seek(line.place)
            data = json.loads(file.read(line.size))
        try:
            return _plan(data, policy)
        except (KeyError, TypeError, IndexError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}: has no valid plan ({error!r}); delete the line") from None


def read_journal(path: Path) -> JournalSteps:
    lines: dict[int, JournalLine] = {}
    if path.is_file():
        place = 0
        with open(path, "rb") as file:
            for number, text in enumerate(file, start=1):
                if text.endswith(b"\n") and text.strip():
                    step, line = _read(text, f"{path}, line {number}", number=number, place=place)
                    lines[step] = line
                place += len(text)
    return JournalSteps(path, {step: lines[step] for step in sorted(lines)})


def _read(text: bytes, where: str, *, number: int, place: int) -> tuple[int, JournalLine]:
    try:
        data = json.loads(text)
        line = JournalLine(
            number=number,
            place=place,
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
    first_lane, cp_size, places = raw
    tokens = sum(padded_length(lengths[i], cp_size) // cp_size for i in places)
    return Pack(int(first_lane), int(cp_size), tuple(places), tokens)
