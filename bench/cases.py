"""The planner's benchmark cases: lengths, lanes, capacity and cost profiles.

In: nothing. Out: the same cases and the same lengths on every machine; the seed is the case's name.
`lengths(Case("two kinds", 1024, 128, 16384))` holds 1014 lengths of 1000 to 2000 and 10 of 131072.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("lognormal", "long tail", "two kinds")
SEQUENCES = (256, 1024, 4096)
LANES_CAPACITY = (
    (8, 16384),
    (32, 16384),
    (128, 16384),
    (512, 16384),
    (1024, 16384),
    (6, 32768),
    (24, 32768),
)
QUICK = ((256, 8, 16384), (1024, 128, 16384), (256, 6, 32768))
GROWTH = ((1024, 128), (4096, 1024), (16384, 4096), (65536, 16384))
LONGEST = 131072

PROFILES: dict[str, dict[str, Any]] = {
    "free": {
        "linear": 1.0,
        "quadratic": 1.9484e-5,
        "gather": [0, 0],
        "node": 8,
        "pack": 0,
        "round": 0,
    },
    "charged": {
        "linear": 1.0,
        "quadratic": 1.9484e-5,
        "gather": [0.01, 0.08],
        "node": 8,
        "pack": 64,
        "round": 0,
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """One step to plan: how many sequences of which kind on how many lanes."""

    kind: str
    sequences: int
    lanes: int
    capacity: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.sequences} on {self.lanes}"


def cases(*, quick: bool = False) -> list[Case]:
    """The grid of the benchmark, or a few small cases of each kind."""
    if quick:
        return [Case(kind, *shape) for kind in KINDS for shape in QUICK]
    return [
        Case(kind, sequences, lanes, capacity)
        for kind in KINDS
        for sequences in SEQUENCES
        for lanes, capacity in LANES_CAPACITY
    ]


def growth_cases(*, quick: bool = False) -> list[Case]:
    """Long tails that grow, for the planning time alone."""
    shapes = GROWTH[:2] if quick else GROWTH
    return [Case("long tail", sequences, lanes, 16384) for sequences, lanes in shapes]


def lengths(case: Case) -> list[int]:
    """The lengths of a case's sequences, in order of arrival."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    if case.kind == "lognormal":
        mu = math.log(4096) - 1.1**2 / 2
        return _clip(rng.lognormal(mu, 1.1, case.sequences), 1024, 8192)
    if case.kind == "long tail":
        return _clip(rng.lognormal(math.log(1024), 1.5, case.sequences), 1, LONGEST)
    if case.kind == "two kinds":
        drawn = rng.integers(1000, 2000, case.sequences, endpoint=True)
        drawn[rng.permutation(case.sequences)[: round(case.sequences / 100)]] = LONGEST
        return [int(n) for n in drawn]
    raise ValueError(f"kind is {case.kind!r}; it may be one of {', '.join(KINDS)}")


def _clip(drawn: np.ndarray, low: int, high: int) -> list[int]:
    return [int(n) for n in np.clip(np.rint(drawn), low, high)]
