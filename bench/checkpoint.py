"""The benchmark of checkpoints: how long training waits for one, and what memory it takes.

    python bench/checkpoint.py            into bench/RESULTS.md
    python bench/checkpoint.py --out F    into the page F

The demo's model and data on two lanes, as gloo ranks. Turns of four steps without a save and four
that begin with one, in the same process: what the call itself takes, what a step takes on the way,
and how much host memory the copy holds, of a lane's own part.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import on_ranks
from results import machine, table, write_section

from longshore.config.check import decoder_config, planner_setting
from longshore.config.load import load_config
from longshore.data.steps import IndexedSteps, Loader, Packing
from longshore.distributed.topology import CPGroups, make_topology
from longshore.model.decoder import Decoder
from longshore.model.init import initial_block
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.shards import fill
from longshore.plan.planner import plan_step
from longshore.plan.types import Plan, Sequence
from longshore.run.data import batch_size, open_sequences
from longshore.train.checkpoint import Checkpoints, Position
from longshore.train.losses import make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.step import Stepper

LANES, EVERY, SAVES, WANTED = 2, 4, 8, 0.05
RESULTS = Path(__file__).with_name("RESULTS.md")


class Found(NamedTuple):
    """Seconds of steps without and with saves, and of the calls; bytes of the copy and of all."""

    plain: list[float]
    busy: list[float]
    calls: list[float]
    writes: list[float]
    host: int
    whole: int


def main() -> int:
    parser = argparse.ArgumentParser(description="measures what checkpoints cost a step")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the page to write into")
    options = parser.parse_args()
    found = on_ranks(LANES, measure)
    text = report(found)
    write_section(options.out, "checkpoint", text)
    print(text)
    share = statistics.median(found.calls) / statistics.median(found.plain)
    return 0 if share <= WANTED and found.host <= found.whole / LANES * 1.05 else 1


def measure() -> Found:
    topology = make_topology(lanes=LANES, device="cpu")
    config = load_config(None)
    decoder = decoder_config(config.model)
    setting = planner_setting(config, lanes=LANES, capacity=2048, decoder=decoder)

    def planner(sequences: Iterable[int | Sequence]) -> Plan:
        return plan_step(sequences, setting)

    groups = CPGroups(topology, planner([1]).setting.cp_sizes)
    with torch.device("meta"):
        model = Decoder(decoder)
    parallelize(model, topology, groups, choices=Choices(mode="none", dtype=torch.float32))
    fill(model, topology.device, partial(initial_block, decoder, seed=0))
    optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    stepper = Stepper(model, optimizer, topology, "none", make_loss(), 1.0)
    steps = IndexedSteps(
        open_sequences(config, decoder),
        planner=planner,
        batch=batch_size(config),
        seed=0,
        topology=topology,
        packing=Packing(depths=len(decoder.mtp)),
    )
    names = [tempfile.mkdtemp(prefix="longshore-bench-") if topology.rank == 0 else ""]
    dist.broadcast_object_list(names, src=0)
    folder = Path(names[0])
    checkpoints = Checkpoints(folder, model, optimizer, topology=topology, keep=2)
    try:
        with Loader(steps) as loader:
            found = _side_by_side(stepper, loader, checkpoints)
    finally:
        if topology.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    checkpoints.close()
    groups.close()
    return found


def _side_by_side(stepper: Stepper, loader: Loader, checkpoints: Checkpoints) -> Found:
    """Turns of steps without and with a save, so that both meet the same machine."""
    plain: list[float] = []
    busy: list[float] = []
    calls: list[float] = []
    writes: list[float] = []
    done = 0
    for turn in range(-1, 2 * SAVES):
        for number in range(EVERY):
            started = time.perf_counter()
            stepper.step(next(loader).batches, lr=1e-3)
            done += 1
            if turn >= 0 and turn % 2 and number == 0:
                before = time.perf_counter()
                checkpoints.save(Position(done, done, loader.state_dict()))
                calls.append(time.perf_counter() - before)
                checkpoints.confirm(done)
            if turn >= 0:
                (busy if turn % 2 else plain).append(time.perf_counter() - started)
        if turn >= 0 and turn % 2:
            before = time.perf_counter()
            checkpoints.wait()
            writes.append(time.perf_counter() - before)
    numbers = sum(p.numel() for p in stepper.model.parameters())
    return Found(plain, busy, calls, writes, checkpoints.host_bytes, numbers * 4 * 3)


def report(found: Found) -> str:
    plain, busy, call = (
        statistics.median(times) * 1e3 for times in (found.plain, found.busy, found.calls[1:])
    )
    rows = [
        ("a step without a save, median", f"{plain:.0f} ms"),
        ("a step of those with one in flight, median", f"{busy:.0f} ms"),
        ("training waits for a save, median", f"{call:.2f} ms, {call / plain:.2%} of a step"),
        ("the first save, which allocates the copy", f"{found.calls[0] * 1e3:.2f} ms"),
        ("a wait for the end of the write, four steps on", f"{max(found.writes) * 1e3:.1f} ms"),
        (
            "host memory of the copy, of model and moments of all lanes",
            f"{found.host:,} of {found.whole:,} bytes",
        ),
    ]
    reached = "reached" if call <= WANTED * plain else "not reached"
    return f"""## Checkpoints

The demo's model, {LANES} lanes that hold it whole, a save after every {EVERY * 2}th step, written
while training goes on; turns of {EVERY} steps with and without. Lane 0's figures.

{table(("what", "measured"), rows)}

Wanted: training waits for at most {WANTED:.0%} of a step, and the copy is this lane's share;
{reached}.

Machine: {machine(("torch", "numpy", "longshore"))}. Made by `python bench/checkpoint.py`.
"""


if __name__ == "__main__":
    sys.exit(main())
