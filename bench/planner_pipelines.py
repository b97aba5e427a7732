"""The planner's benchmark for pipelines: planning time, and how near the plans are to the bound.

    python bench/planner_pipelines.py           into bench/RESULTS.md
    python bench/planner_pipelines.py --print   printed only

Times are the process's CPU time, the best of a few, on one thread: on a machine that is otherwise
idle that is the time it takes. All stages are alike, and the profile is the planner's benchmark's
*charged* one.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cases import PROFILES, Case, lengths
from results import machine, table, write_section

from longshore.plan import make_plan
from longshore.plan.cost import parse_profile
from longshore.plan.lengths_file import demo_lengths
from longshore.plan.types import Stats

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
RESULTS = Path(__file__).with_name("RESULTS.md")
REPEATS = 3
DEMO = "built-in sample"
TAIL = "long tail"

SHAPES = (
    *((Case(DEMO, 1024, 128, 16384), pp, vpp) for pp, vpp in ((1, 1), (4, 1), (4, 2), (8, 2))),
    *((Case(TAIL, 1024, 128, 16384), pp, vpp) for pp, vpp in ((1, 1), (4, 1), (4, 2), (8, 2))),
    *((Case(TAIL, 4096, 1024, 16384), pp, 1) for pp in (1, 4)),
    *((Case(TAIL, 1024, 8, 16384), pp, 1) for pp in (1, 4)),
    *((Case(TAIL, 2048, 16, 8192), pp, 1) for pp in (1, 4)),
    *((Case(TAIL, 2048, 8, 16384), pp, vpp) for pp, vpp in ((1, 1), (4, 2), (8, 1))),
    *((Case(TAIL, 4096, 32, 16384), pp, 1) for pp in (1, 4)),
    *((Case(TAIL, 4096, 8, 16384), pp, vpp) for pp, vpp in ((1, 1), (8, 2))),
)
LIMITS = {(DEMO, 1024): 0.5, (TAIL, 1024): 0.5, (TAIL, 4096): 1.0}
"""Seconds that planning may take, for cases with more lanes than 100."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One plan of a case with a pipeline, or without."""

    case: Case
    """What was planned."""
    pp: int
    """Pipeline ranks."""
    vpp: int
    """Stages of each."""
    seconds: float
    """Of planning."""
    stats: Stats
    """The plan's figures."""

    @property
    def rounds_per_stage(self) -> float:
        return self.stats.rounds / (self.pp * self.vpp)


def main() -> int:
    options = _options()
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):
        again = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
        os.execve(sys.executable, [sys.executable, *sys.argv], again)
    text = report([planned(*shape) for shape in SHAPES])
    if not options.print:
        write_section(RESULTS, "pipelines", text)
    print(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the planner for pipelines.")
    parser.add_argument("--print", action="store_true", help="do not write bench/RESULTS.md")
    return parser.parse_args()


def planned(case: Case, pp: int, vpp: int) -> Planned:
    drawn = demo_lengths().lengths if case.kind == DEMO else lengths(case)
    profile = parse_profile(PROFILES["charged"], "charged")
    best = float("inf")
    for _ in range(REPEATS):
        began = time.process_time()
        plan = make_plan(
            drawn, lanes=case.lanes, capacity=case.capacity, profile=profile, pp=pp, vpp=vpp
        )
        best = min(best, time.process_time() - began)
    return Planned(case, pp, vpp, best, plan.stats)


def report(rows: list[Planned]) -> str:
    header = ["case", "pp", "vpp", "planning", "rounds", "above the bound", "bubble"]
    cells = [
        [
            row.case.name,
            str(row.pp),
            str(row.vpp),
            f"{row.seconds:.2f} s",
            str(row.stats.rounds),
            f"{row.stats.gap:.1%}",
            f"{row.stats.bubble:.1%}",
        ]
        for row in rows
    ]
    about = (
        "Repeat with `python bench/planner_pipelines.py`. Measured on: "
        f"{machine(('longshore', 'numpy'))}; one thread, CPU time of planning, best of {REPEATS}."
    )
    return "\n\n".join(
        ["## Planner, pipelines", about, table(header, cells), "\n".join(checks(rows))]
    )


def checks(rows: list[Planned]) -> list[str]:
    """The targets, each with the worst value met."""
    single = {row.case: row.seconds for row in rows if row.pp == 1}
    piped = [row for row in rows if row.pp > 1]
    lines = []
    for (kind, count), limit in LIMITS.items():
        wide = [r for r in piped if (r.case.kind, r.case.sequences) == (kind, count)]
        worst = max(r.seconds for r in wide if r.case.lanes > 100)
        lines.append(_line(f"planning {kind}, {count}: at most {limit} s", worst, limit, "s"))
    many = [r for r in piped if r.case.sequences == 1024 and r.case.lanes == 128]
    factor = max(r.seconds / single[r.case] for r in many)
    lines.append(_line("1024 on 128: at most 5 times as without a pipeline", factor, 5.0, "times"))
    gap = max(r.stats.gap for r in piped if r.case.kind == TAIL and r.rounds_per_stage >= 4)
    lines.append(
        _line("long tail, 4 rounds for each stage: at most 10 % above", 100 * gap, 10.0, "%")
    )
    return lines


def _line(target: str, worst: float, limit: float, unit: str) -> str:
    return f"- {target}: {worst:.2f} {unit}, {'reached' if worst <= limit else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main())
