"""Whether a cap chosen on some steps serves others: graph.max_sequences=auto on held-out steps.

    python bench/graph_caps.py             all cases, into bench/RESULTS.md
    python bench/graph_caps.py --quick     a few steps, printed only

The cap is chosen as a run does it (run/auto.py): it serves 95 % of the micro-batches with one
pack of CP size 1 in each quarter of the sampled steps, and has an eighth to spare. Then other steps
of the same distribution are planned and counted. No GPU is needed: what a graph serves is decided
from the plan.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from cases import KINDS, Case, lengths
from results import machine, table, write_section

from longshore.data.source import Batches, BatchSize
from longshore.plan import make_plan
from longshore.plan.cost import Ints
from longshore.plan.graph_use import (
    BUCKETS,
    MicroBatchSizes,
    choose_cap,
    steady_cap,
)
from longshore.plan.shapes import lane_packs, lane_tokens, make_buckets
from longshore.plan.types import Plan
from longshore.run.auto import SAMPLE_SEQUENCES, SAMPLE_STEPS, sampled_plans

RESULTS = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("longshore", "numpy")
SHAPES = ((1, 4096, 64), (1, 16384, 128), (8, 8192, 256), (8, 16384, 256), (64, 16384, 1024))
"""Lanes, capacity, sequences of a step."""
STEPS, QUICK_STEPS = (60, 48, 36), (8,)
"""Steps of each draw, sampled from and held out; another number is another seed."""
COVERAGE, WANTED = 0.95, 0.90
HEADER = (
    "distribution",
    "lanes × capacity",
    "sampled, s",
    "cap",
    "served whole, sampled",
    "served whole, held out",
    "held out, plain rule",
    "slots empty",
    "held-out tokens added by buckets",
    "others (by halves)",
)


@dataclass(frozen=True, slots=True)
class CapOutcome:
    """One distribution on one shape."""

    case: Case
    """Lanes, capacity and sequences of a step."""
    seconds: float
    """To plan the sample."""
    cap: int
    """Chosen on the sample."""
    plain: int
    """The least cap that serves the coverage of the whole sample, for comparison."""
    sampled: MicroBatchSizes
    """Micro-batches of the sample."""
    held_out: MicroBatchSizes
    """Micro-batches of other steps."""
    padding: float
    """Share of the held-out steps' tokens that buckets add."""

    @property
    def covered(self) -> float:
        return self.held_out.covered(self.cap)


def measure(case: Case, steps: int) -> CapOutcome:
    """Chooses on the first half of the sequences, counts on the second."""
    drawn = lengths(Case(case.kind, 2 * steps * case.sequences, case.lanes, case.capacity))
    clipped = np.minimum(np.array(drawn, dtype=np.int64), case.lanes * case.capacity)
    buckets = make_buckets(case.capacity, count=BUCKETS)
    planner = partial(make_plan, lanes=case.lanes, capacity=case.capacity, buckets=buckets)
    half = len(clipped) // 2
    begin = time.perf_counter()
    sample = _batches(clipped[:half], case.sequences)
    sampled = list(sampled_plans(sample, planner))
    seconds = time.perf_counter() - begin
    cap = steady_cap(sampled, COVERAGE)
    plans = list(_plans(clipped[half:], case.sequences, planner))
    return CapOutcome(
        case,
        seconds,
        cap,
        plain=choose_cap(sampled, COVERAGE),
        sampled=MicroBatchSizes.of(sampled),
        held_out=MicroBatchSizes.of(plans),
        padding=added_by_rounding(plans),
    )


def added_by_rounding(plans: list[Plan]) -> float:
    """The share of the lanes' tokens that rounding up to buckets or `align` adds."""
    tokens = totals = 0
    for plan in plans:
        for number, lane in product(range(len(plan.rounds)), range(plan.setting.lanes)):
            if packs := lane_packs(plan, number, lane):
                tokens += sum(pack.tokens_per_lane for pack in packs)
                totals += lane_tokens(plan, number, lane)
    return 1 - tokens / totals if totals else 0.0


def _batches(drawn: Ints, sequences: int) -> Batches:
    return Batches(drawn, BatchSize("sequences", sequences), seed=0)


def _plans(drawn: Ints, sequences: int, planner: "partial[Plan]") -> Iterator[Plan]:
    for start in range(0, len(drawn), sequences):
        yield planner(drawn[start : start + sequences].tolist())


def row(outcome: CapOutcome) -> list[str]:
    case, cap = outcome.case, outcome.cap
    counts = [len(sizes.alone) for sizes in (outcome.sampled, outcome.held_out)]
    return [
        case.kind,
        f"{case.lanes} × {case.capacity:,}",
        f"{outcome.seconds:.1f}",
        str(cap),
        f"{outcome.sampled.covered(cap):.1%} of {counts[0]:,}",
        f"{outcome.covered:.1%} of {counts[1]:,}",
        f"{outcome.held_out.covered(outcome.plain):.1%} (cap {outcome.plain})",
        f"{outcome.held_out.empty_share(cap):.0%}",
        f"{outcome.padding:.1%}",
        f"{outcome.held_out.others:,}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps; prints only")
    options = parser.parse_args()
    outcomes = []
    for steps in QUICK_STEPS if options.quick else STEPS:
        for kind in KINDS:
            for lanes, capacity, sequences in SHAPES:
                outcomes.append(measure(Case(kind, sequences, lanes, capacity), steps))
                print(" | ".join(row(outcomes[-1])), flush=True)
    if not options.quick:
        write_section(RESULTS, "graph caps", report(outcomes))
    return 0


def report(outcomes: list[CapOutcome]) -> str:
    known = [outcome for outcome in outcomes if len(outcome.held_out.alone)]
    least = min(known, key=lambda outcome: outcome.covered)
    passed = sum(outcome.covered >= WANTED for outcome in known)
    plain = sum(outcome.held_out.covered(outcome.plain) >= WANTED for outcome in known)
    return (
        "## Caps of CUDA graphs\n\n"
        f"Repeat with `python bench/graph_caps.py`. Measured on: {machine(PACKAGES)}; the machine "
        "had other work, so the seconds are upper limits.\n\n"
        f"`graph.max_sequences=auto` with `graph.coverage` {COVERAGE:g}: a cap chosen on a sample "
        f"of up to {SAMPLE_STEPS} steps or {SAMPLE_SEQUENCES:,} sequences, then counted on other "
        f"steps of the same distribution; {len(STEPS)} draws of {', '.join(map(str, STEPS))} "
        "steps. A sequence longer than all lanes hold is cut to that. Only micro-batches with one "
        "pack of CP size 1 can be replayed as whole layers. Slots empty: entries of the boundary "
        "array that no sequence uses, in the micro-batches served. A graph fixes the number of "
        f"tokens too, by {BUCKETS} buckets: this padding is one more sequence, and tokens that "
        "every layer computes.\n\n"
        f"**{passed} of {len(known)} cases serve at least {WANTED:.0%} of held-out "
        f"micro-batches**, the least {least.covered:.1%} ({least.case.kind}, {least.case.lanes} × "
        f"{least.case.capacity:,}); with the plain rule, the least cap for the whole sample, "
        f"{plain} do.\n\n"
        "How the rule came about: a first sample ended after 512 micro-batches, on several lanes a "
        "few steps, and with the plain rule 13 of 15 cases of an earlier draw of 32 steps reached "
        "90 % (the others 89.4 % and 32.9 %). The planner decides about a step as a whole, so the "
        "sample now counts steps, and the cap has to serve each quarter of them. In 3 draws of 64, "
        "52 and 40 steps 44 of 45 cases then reached 90 %, and one 89.1 %. So an eighth more is "
        "added, at least 1. The draws of this page were made after that, and nothing was changed "
        "since.\n\n" + table(HEADER, map(row, outcomes))
    )


if __name__ == "__main__":
    raise SystemExit(main())
