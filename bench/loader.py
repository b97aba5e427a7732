"""The loader's benchmark: how long a training step waits for its data, and whether memory grows.

    python bench/loader.py            into bench/RESULTS.md
    python bench/loader.py --out F    into the page F

Eight lanes as gloo ranks, a million mock sequences, 256 a step, and a fake step of one second, so
that the background thread has that long to plan, read, agree and pack. Then as many steps as
possible without any training, to see what a step costs the thread and whether memory stays flat.
"""

import argparse
import resource
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ranks import on_ranks
from results import machine, table, write_section

from longshore.data.mock import MockSource
from longshore.data.source import BatchSize
from longshore.data.steps import IndexedSteps, Loader, Packing
from longshore.distributed.topology import make_topology
from longshore.plan import make_plan
from longshore.plan.shapes import make_buckets

LANES, CAPACITY, SEQUENCES, BATCH = 8, 16384, 1_000_000, 256
TRAINING_STEPS, STEP_SECONDS, BARE_STEPS = 20, 1.0, 120
WANTED = 0.010
MOCK = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 64,
    "max_seq_len": 65536,
    "mean_seq_len": 2048,
    "lognormal_sigma": 1.1,
}
RESULTS = Path(__file__).with_name("RESULTS.md")


class Found(NamedTuple):
    """Seconds waited for each step, seconds of a bare step, MiB before and after."""

    waits: list[float]
    bare: float
    before: float
    after: float


def main() -> int:
    parser = argparse.ArgumentParser(description="measures the loader's visible wait")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the page to write into")
    options = parser.parse_args()
    found = on_ranks(LANES, measure)
    text = report(found)
    write_section(options.out, "loader", text)
    print(text)
    return 0 if max(found.waits) <= WANTED else 1


def measure() -> Found:
    topology = make_topology(lanes=LANES, device="cpu")
    steps = IndexedSteps(
        MockSource(MOCK, count=SEQUENCES, vocab_size=32000, seed=0),
        planner=partial(make_plan, lanes=LANES, capacity=CAPACITY),
        batch=BatchSize("sequences", BATCH),
        seed=0,
        topology=topology,
        packing=Packing(depths=1, buckets=make_buckets(CAPACITY)),
    )
    with Loader(steps, prefetch=2) as loader:
        next(loader)
        waits = []
        for _ in range(TRAINING_STEPS):
            time.sleep(STEP_SECONDS)
            waits.append(next(loader).wait_seconds)
        before, started = memory(), time.perf_counter()
        for _ in range(BARE_STEPS):
            next(loader)
        bare = (time.perf_counter() - started) / BARE_STEPS
        return Found(waits, bare, before, memory())


def memory() -> float:
    """MiB this process has at most held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(found: Found) -> str:
    worst, usual = max(found.waits) * 1e3, statistics.median(found.waits) * 1e3
    rows = [
        ("wait of a step, median / worst", f"{usual:.2f} / {worst:.2f} ms"),
        ("a step without training (all 8 lanes share this machine)", f"{found.bare * 1e3:.0f} ms"),
        (
            f"memory of a lane before / after {BARE_STEPS} more steps",
            f"{found.before:.0f} / {found.after:.0f} MiB",
        ),
    ]
    verdict = "reached" if worst <= WANTED * 1e3 else "not reached"
    return f"""## Loader

{LANES} lanes, {SEQUENCES:,} mock sequences, {BATCH} a step, indexed, mixed plans, one depth of
multi-token prediction, two steps made ahead; {TRAINING_STEPS} fake training steps of
{STEP_SECONDS:g} s. Lane 0's figures.

{table(("what", "measured"), rows)}

Wanted: a visible wait of at most {WANTED * 1e3:g} ms a step; {verdict}.

Machine: {machine(("torch", "numpy", "longshore"))}. Made by `python bench/loader.py`.
"""


if __name__ == "__main__":
    sys.exit(main())
