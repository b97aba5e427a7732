"""The sharded shift's benchmark: one exchange for a whole pack beside one for each sequence.

    python bench/shift.py            into bench/RESULTS.md
    python bench/shift.py --out F    into the page F

Four gloo ranks, CP 4. Both sides run in turns in one run and must give equal tensors; a time is the
median over the repeats, each from a barrier to the slowest rank's end.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import on_ranks
from results import machine, table, write_section
from torch import Tensor

from longshore.parallel.shift import shift

CP_SIZE = 4
CASES = ((256, 64, 1), (256, 64, 64), (64, 256, 1), (8, 2048, 1))
REPEATS = 15
WANTED = 20.0
RESULTS = Path(__file__).with_name("RESULTS.md")


class Timing(NamedTuple):
    """Seconds of a shift, on the slowest rank."""

    batched: float
    one_by_one: float

    @property
    def ratio(self) -> float:
        return self.one_by_one / self.batched


def main() -> int:
    parser = argparse.ArgumentParser(description="times the sharded shift")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the page to write into")
    options = parser.parse_args()
    timings = on_ranks(CP_SIZE, measure_all)
    text = report(timings)
    write_section(options.out, "shift", text)
    print(text)
    return 0 if timings[0].ratio >= WANTED else 1


def measure_all() -> list[Timing]:
    return [measure(*case) for case in CASES]


def measure(sequences: int, length: int, width: int) -> Timing:
    """Both ways in turns, on a pack of equal sequences."""
    boundaries = [length * number for number in range(sequences + 1)]
    rows = sequences * length // CP_SIZE
    shard = torch.arange(rows * width, dtype=torch.float32).view(rows, width) + dist.get_rank()

    def batched() -> Tensor:
        return shift(shard, real=boundaries, padded=boundaries, group=dist.group.WORLD)[0]

    def one_by_one() -> Tensor:
        return shift_one_by_one(shard, length // (2 * CP_SIZE))

    assert torch.equal(batched(), one_by_one())
    turns = [Timing(timed(batched), timed(one_by_one)) for _ in range(REPEATS)]
    slowest = torch.tensor(turns)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Timing(*(statistics.median(column) for column in slowest.T.tolist()))


def timed(function: Callable[[], Tensor]) -> float:
    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def shift_one_by_one(shard: Tensor, chunk: int) -> Tensor:
    """The same shift with a point-to-point exchange for each sequence, all without padding."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    shifted = torch.empty_like(shard)
    for start in range(0, len(shard), 2 * chunk):
        early, late = shard[start : start + chunk], shard[start + chunk : start + 2 * chunk]
        below = shifted[start : start + chunk], shifted[start + chunk : start + 2 * chunk]
        for new, old in zip(below, (early, late), strict=True):
            new[:-1] = old[1:]
        below[0][-1] = late[0]
        below[1][-1] = 0
        after_early, after_late = below[0][-1:], below[1][-1:]
        ops = []
        if rank > 0:
            ops.append(dist.P2POp(dist.isend, early[:1], rank - 1))
            ops.append(dist.P2POp(dist.irecv, after_late, rank - 1))
        if rank < last:
            ops.append(dist.P2POp(dist.isend, late[:1], rank + 1))
            ops.append(dist.P2POp(dist.irecv, after_early, rank + 1))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return shifted


def report(timings: list[Timing]) -> str:
    rows = [
        [
            f"{sequences} × {length} × {width}",
            f"{timing.batched * 1e3:.2f} ms",
            f"{timing.one_by_one * 1e3:.2f} ms",
            f"{timing.ratio:.0f}",
        ]
        for (sequences, length, width), timing in zip(CASES, timings, strict=True)
    ]
    first = timings[0].ratio
    verdict = "reached" if first >= WANTED else "missed"
    header = [
        "sequences × length × width",
        "one exchange",
        "one for each sequence",
        "times as fast",
    ]
    return f"""\
## Shift of sharded tensors

Left by one over a CP group of {CP_SIZE} gloo ranks, float32, forward, without padding: all heads in
one all-to-all, beside a batch of point-to-point messages for each sequence. Median of {REPEATS}, of
the slowest rank, in turns in one run.

{table(header, rows)}
Wanted at {CASES[0][0]} sequences: at least {WANTED:g} times as fast; {verdict}, {first:.0f} times.

Machine: {machine(("torch", "longshore"))}. Made by `python bench/shift.py`.
"""


if __name__ == "__main__":
    sys.exit(main())
