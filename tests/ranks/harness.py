"""Runs a function on several gloo ranks, each a process of its own, and brings back the results.

    def add(x):
        total = torch.tensor(x + dist.get_rank())
        dist.all_reduce(total)
        return total.item()

    run_ranks(3, add, 10)  →  [33, 33, 33]

The processes are forked from a server that has imported PRELOAD (once, about 3 s), so that a run
costs about a tenth of a second; they find each other through a file, so no port is taken. Fresh
processes for every run: keeping them would save half of that and carry state from test to test.
If a rank fails or dies, or the time is up, all are killed and RankError shows each rank's
traceback, or where it was stuck, and what it wrote. Our own warnings are errors there, as in other
tests.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = (
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",  # a first backward imports it, for seconds
    "torch.testing",
    "numpy",
    "pytest",
    "hypothesis",
    "longshore.plan",
    "longshore.distributed.collectives",
    "longshore.distributed.topology",
    "longshore.data.steps",
    "longshore.parallel.apply",
    "longshore.parallel.shift",
    "longshore.train.step",
    "longshore.train.checkpoint",
    "tests.ranks.spine",
    "tests.ranks.composed",
)
GRACE_S = 2.0  # for the other ranks, once one has failed, to say what they saw
STACKS_S = 0.5  # to write down where they were stuck
SHOWN = 4000  # characters of each rank's output


class RankError(Exception):
    """A rank raised, died or did not end in time."""


def run_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """What function(*args) returns on each rank, in their order.

    The function stands at the top of a module and is called with the default group set up; it,
    the arguments and the results are pickled. `timeout` is in seconds, for the whole run.
    """
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        run = _Run(ranks, pickle.dumps((function, args)), Path(folder), timeout)
        try:
            return run.results()
        finally:
            run.end()


class _Run:
    """The processes of one run, and what has come back from them."""

    def __init__(self, ranks: int, task: bytes, folder: Path, timeout: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.folder, self.timeout = folder, timeout
        self.done: dict[int, Any] = {}
        self.failures: dict[int, str] = {}
        self.pending: dict[Connection, int] = {}
        self.processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = (rank, ranks, str(folder), timeout)
            process = context.Process(target=_work, args=(place, task, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pending[ours] = rank

    def results(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        while self.pending and (left := deadline - time.monotonic()) > 0:
            for ready in connection.wait(list(self.pending), left):
                self._take(ready)
                if self.failures:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if self.pending or self.failures:
            raise RankError(self._report())
        return [self.done[rank] for rank in sorted(self.done)]

    def _take(self, ready: Connection) -> None:
        rank = self.pending.pop(ready)
        try:
            worked, content = pickle.loads(ready.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(GRACE_S)
            code = self.processes[rank].exitcode
            worked, content = False, f"died with exit code {code}"
        ready.close()
        (self.done if worked else self.failures)[rank] = content

    def _report(self) -> str:
        """Every rank in words, the first to fail first."""
        stuck = sorted(self.pending.values())
        self._write_stacks(stuck)
        said = [f"rank {rank} failed: {text}" for rank, text in self.failures.items()]
        if stuck and not self.failures:
            said.append(f"not done after {self.timeout:g} s: ranks {stuck}")
        said += [f"rank {rank} was still running" for rank in stuck if self.failures]
        for path in sorted(self.folder.glob("rank*.log")):
            if written := path.read_text(errors="replace").strip():
                said.append(f"{path.stem} wrote:\n{written[-SHOWN:]}")
        return "\n\n".join(["a run on ranks failed", *said])

    def _write_stacks(self, stuck: list[int]) -> None:
        """Has these ranks write down where each of their threads is."""
        for rank in stuck:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if stuck:
            time.sleep(STACKS_S)

    def end(self) -> None:
        for process in self.processes:
            process.join(GRACE_S if not self.pending and not self.failures else 0)
            process.kill()
            process.join()
            process.close()
        for ours in self.pending:
            ours.close()


def _work(place: tuple[int, int, str, float], task: bytes, results: Connection) -> None:
    """One rank, from its first to its last line."""
    rank, _, folder, _ = place
    with open(f"{folder}/rank{rank}.log", "w") as log:
        sys.stdout.flush()
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        sys.stdout = sys.stderr = log
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        try:
            answer = pickle.dumps((True, _run_task(place, task)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        results.send_bytes(answer)
        results.close()
        log.flush()
        # Nothing of the parent's is to be torn down here, and a failed rank's groups cannot be.
        os._exit(0)


def _run_task(place: tuple[int, int, str, float], task: bytes) -> Any:
    import torch
    import torch.distributed as dist

    rank, ranks, folder, timeout = place
    warnings.simplefilter("default")
    for ours in ("longshore", "tests"):
        warnings.filterwarnings("error", module=ours)
    warnings.filterwarnings("default", message="mkldnn bf16 path")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    function, args = pickle.loads(task)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    result = function(*args)
    if dist.is_initialized():
        # A rank that leaves early would take its connections from those that still read.
        dist.barrier()
        dist.destroy_process_group()
    return result
