"""The planner's benchmark: longshore's policies beside Megatron's scheduler, on one evaluator.

    python bench/planner.py                  all cases, into bench/RESULTS.md
    python bench/planner.py --quick          a few cases, printed only
    python bench/planner.py --quick --out F  a few cases, into the page F

Megatron's columns need the extra `bench`, and say so without it.
"""

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peer_megatron
from cases import PROFILES, Case, cases, growth_cases, lengths
from evaluate import Setting, lower_bound, score
from outcomes import FITTED, OWN, POLICIES, SYNCS, Outcome, Outcomes
from peer_megatron import Megatron, Peer
from planner_checks import checks
from planner_tables import report
from results import machine, one_line, write_section

from longshore.plan import make_plan
from longshore.plan.cost import parse_profile
from longshore.plan.types import Plan

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PACKAGES = ("longshore", "numpy", "megatron-core")
RESULTS = Path(__file__).with_name("RESULTS.md")
REPEATS = 3
REPEAT_BELOW = 2.0


def main() -> int:
    options = _options()
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):
        again = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
        os.execve(sys.executable, [sys.executable, *sys.argv], again)
    megatron = Megatron()
    try:
        grid = cases(quick=options.quick)
        outcomes = Outcomes(o for case in grid for o in measure(case, POLICIES, megatron))
        larger = growth_cases(quick=options.quick)
        growth = Outcomes(o for case in larger for o in measure(case, ("mixed",), megatron))
    finally:
        megatron.close()
    found = checks(outcomes, growth)
    text = report(outcomes, growth, found, peer_megatron.version(), _about(options))
    if options.out is not None:
        write_section(options.out, "planner", text)
    print(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the planner beside Megatron's.")
    parser.add_argument("--quick", action="store_true", help="a few small cases; prints only")
    parser.add_argument(
        "--out", type=Path, help="page whose section 'Planner' is rewritten (bench/RESULTS.md)"
    )
    options = parser.parse_args()
    if options.out is None and not options.quick:
        options.out = RESULTS
    return options


def _about(options: argparse.Namespace) -> str:
    words = ["python", "bench/planner.py"]
    if options.quick:
        words.append("--quick")
    return (
        f"Repeat with `{shlex.join(words)}`. Measured on: {machine(PACKAGES)}; one thread, "
        f"planning time best of {REPEATS} (of 1 above {REPEAT_BELOW:.0f} s)."
    )


def measure(case: Case, policies: tuple[str, ...], megatron: Megatron) -> Iterator[Outcome]:
    """Every outcome of a case: all profiles and sync modes, ours and Megatron's."""
    began = time.perf_counter()
    drawn = lengths(case)
    peer = megatron.plan(drawn, case.lanes, case.capacity)
    for profile, values in PROFILES.items():
        bound = lower_bound(Setting(drawn, case.lanes, case.capacity, values, "round"))
        for sync in SYNCS:
            setting = Setting(drawn, case.lanes, case.capacity, values, sync)
            base = Outcome(case, profile, sync, "", bound)
            for policy in policies:
                yield ours(base, policy, setting)
            yield theirs(base, OWN, peer, setting)
            yield theirs(base, FITTED, peer, setting)
    print(f"{case.name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def ours(base: Outcome, policy: str, setting: Setting) -> Outcome:
    """Plans with longshore, REPEATS times where that is quick, and keeps the shortest time."""
    profile = parse_profile(setting.profile, base.profile)
    best, spent = float("inf"), 0.0
    for _ in range(REPEATS):
        began = time.perf_counter()
        try:
            plan = make_plan(
                setting.lengths,
                lanes=setting.lanes,
                capacity=setting.capacity,
                policy=policy,
                sync=setting.sync,
                profile=profile,
            )
        except Exception as error:  # a failure is a result too
            return replace(base, policy=policy, note=one_line(error))
        took = time.perf_counter() - began
        best, spent = min(best, took), spent + took
        if spent > REPEAT_BELOW:
            break
    said = replace(
        base,
        policy=policy,
        seconds=best,
        said_predicted=plan.stats.predicted,
        said_bound=plan.stats.lower_bound,
    )
    return _scored(said, as_json(plan), setting)


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan's step in the form that `longshore plan --json` writes, as far as scoring needs it."""
    fields = ("first_lane", "cp_size", "tokens_per_lane")
    rounds = [
        [{f: getattr(p, f) for f in fields} | {"sequences": list(p.sequences)} for p in r.packs]
        for r in plan.rounds
    ]
    return {"rounds": [{"packs": packs} for packs in rounds]}


def theirs(base: Outcome, policy: str, peer: Peer, setting: Setting) -> Outcome:
    """Scores one reading of Megatron's plan."""
    step = peer.own if policy == OWN else peer.fitted
    said = replace(base, policy=policy, seconds=peer.seconds, note=peer.note)
    return said if step is None else _scored(said, step, setting)


def _scored(said: Outcome, step: dict[str, Any], setting: Setting) -> Outcome:
    """Faults that leave the cost unknown become the note."""
    found = score(step, setting)
    if math.isnan(found.predicted):
        return replace(said, faults=found.faults, note=f"invalid: {found.faults[0]}")
    return replace(
        said,
        predicted=found.predicted,
        rounds=found.rounds,
        efficiency=found.efficiency,
        faults=found.faults,
    )


if __name__ == "__main__":
    sys.exit(main())
