"""Starts the ranks of a run on this machine, or finds this process among those of torchrun.

In: a function, a config and a number of ranks. Out: the function's work done on every rank, or the
error of the rank that failed first: a ValueError, RunError or StoppedError as it is, anything else
as RankError with that rank's traceback. With 4 ranks on 2 cores each rank computes with 1 thread.

The processes are forked from a server that has imported torch once; one rank alone runs here. They
meet through a file, so no port is taken. When a rank fails or dies the others are ended, and all
end when this process does, however it does; SIGTERM is passed on, and the ranks end in their own
time. Rank 0 writes to the terminal, the others to a file that is shown only if they die.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import FrameType
from typing import NoReturn

from longshore.config.ranks import Ranks
from longshore.config.resume import Start
from longshore.config.sections import RunConfig
from longshore.train.stop import RunError, StoppedError

Work = Callable[[RunConfig, Ranks], None]

PRELOAD = (
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",  # a first backward imports it, for seconds
    "longshore.run",
)
GRACE_S = 1.0  # for the rank whose error it is, once another has failed of it
END_S = 5.0  # for ranks to end by themselves
SHOWN = 4000  # characters of what a dead rank wrote
SHOW_CURSOR = "\x1b[?25h"


class RankError(Exception):
    """A rank raised what is not the user's mistake, or died. Its text is for people."""


def ranks_from_environment() -> Ranks | None:
    """This process's place if torchrun started it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    texts = [os.environ.get(name) for name in names]
    if None in texts:
        return None
    try:
        rank, world_size, local_rank = (int(text or "") for text in texts)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError:
        raise ValueError(f"the environment has {', '.join(names)} that are no numbers") from None
    return Ranks(rank, world_size, local_rank, local_size, "env://")


def start_from_environment() -> Start:
    """Whether torchrun restarts this process, and the name of its job."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    name = f"process {os.getppid()}" if job == "none" else job
    return Start(attempt=int(count) if count.isdecimal() else 0, job=name)


def gpu_count() -> int:
    """GPUs that this process may use, without asking torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(glob("/dev/nvidia[0-9]*"))


def launch(work: Work, config: RunConfig, ranks: int) -> None:
    """Calls work(config, ranks) on each rank; `work` stands at the top of a module."""
    with tempfile.TemporaryDirectory(prefix="longshore-") as folder:
        if ranks == 1:
            work(config, _local(0, 1, folder))
            return
        run = _Run(work, config, ranks, folder)
        try:
            with _sigterm(run.stop):
                run.wait()
        finally:
            run.end()


def _local(rank: int, ranks: int, folder: str) -> Ranks:
    return Ranks(rank, ranks, rank, ranks, f"file://{folder}/store")


def _start_server(context: ForkServerContext) -> None:
    """Starts it deaf to Ctrl-C, which would show where among its imports it was."""
    context.set_forkserver_preload(list(PRELOAD))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Has SIGTERM call `stop`; signals are the main thread's."""

    def note(number: int, frame: FrameType | None) -> None:
        stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _preload_here(error: Exception) -> NoReturn:
    """The server has ended with its imports: they tell why, here."""
    for name in PRELOAD:
        importlib.import_module(name)
    raise error


class _Run:
    """The processes of a run, and what has come back from them."""

    def __init__(self, work: Work, config: RunConfig, ranks: int, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        _start_server(context)
        self.folder = Path(folder)
        self.pending: dict[Connection, int] = {}
        self.processes: list[ForkServerProcess] = []
        self.is_told_to_stop = False
        self.stopped: dict[int, str] = {}
        self.told: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        self.failed: dict[int, str] = {}
        self.died: dict[int, str] = {}
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = _local(rank, ranks, folder)
            process = context.Process(target=_work, args=(work, config, place, theirs), daemon=True)
            try:
                process.start()
            except (EOFError, OSError) as error:
                _preload_here(error)
            theirs.close()
            self.processes.append(process)
            self.pending[ours] = rank

    def stop(self) -> None:
        """Passes SIGTERM on: the ranks agree on a step, save a checkpoint and end."""
        self.is_told_to_stop = True
        for process in self.processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def wait(self) -> None:
        deadline: float | None = None
        while self.pending and (deadline is None or time.monotonic() < deadline):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for ready in connection.wait([*self.pending], left):
                assert isinstance(ready, Connection)
                self._take(ready)
            if deadline is None and (self.refused or self.told or self.failed or self.died):
                deadline = time.monotonic() + GRACE_S
        self._raise_first()

    def _take(self, ready: Connection) -> None:
        rank = self.pending.pop(ready)
        try:
            state, text = ready.recv()
        except (EOFError, OSError):
            state, text = "died", self._last_words(rank)
        ready.close()
        if state == "interrupted":
            raise KeyboardInterrupt
        found: dict[str, dict[int, str]] = {
            "stopped": self.stopped,
            "told": self.told,
            "refused": self.refused,
            "failed": self.failed,
            "died": self.died,
        }
        if state in found:
            found[state][rank] = text

    def _raise_first(self) -> None:
        """Others fail of a rank that refused or died: the cause goes first."""
        for message in self.refused.values():
            raise ValueError(message)
        for _, message in sorted(self.told.items()):
            raise RunError(message)
        for _, message in sorted(self.stopped.items()):
            raise StoppedError(message)
        if self.is_told_to_stop and self.died:
            raise StoppedError("stopped before the first step")
        for found in (self.died, self.failed):
            for rank, text in found.items():
                raise RankError(f"rank {rank} {text}")

    def _last_words(self, rank: int) -> str:
        """How a rank died, and what it wrote before."""
        process = self.processes[rank]
        process.join(END_S)
        code = process.exitcode
        text = f"ended with exit code {code}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            memory = " (is the memory used up?)" if name == "SIGKILL" else ""
            text = f"was ended by {name}{memory}"
        log = self.folder / f"rank{rank}.log"
        written = log.read_text(errors="replace").strip() if log.exists() else ""
        return f"{text}; it wrote:\n{written[-SHOWN:]}" if written else text

    def end(self) -> None:
        """Waits for those that end by themselves, ends the others, and gives the cursor back."""
        waits = {type(None): END_S, KeyboardInterrupt: GRACE_S}
        deadline = time.monotonic() + waits.get(type(sys.exc_info()[1]), 0.0)
        killed = False
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                killed = True
                process.kill()
        for process in self.processes:
            process.join()
            process.close()
        if killed and sys.stdout.isatty():
            print(end=SHOW_CURSOR, flush=True)


def _work(work: Work, config: RunConfig, ranks: Ranks, results: Connection) -> None:
    """One rank, from its first to its last line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, args=(results,), daemon=True).start()
    if ranks.rank:
        _write_to(Path(ranks.rendezvous.removeprefix("file://")).with_name(f"rank{ranks.rank}.log"))
    faulthandler.enable()
    try:
        _share_cores(ranks.local_size)
        work(config, ranks)
        answer = ("done", "")
    except KeyboardInterrupt:
        answer = ("interrupted", "")
    except StoppedError as error:
        answer = ("stopped", str(error))
    except RunError as error:
        answer = ("told", str(error))
    except ValueError as error:
        answer = ("refused", str(error))
    except BaseException:
        answer = ("failed", f"failed:\n{traceback.format_exc()}")
    with suppress(OSError):
        results.send(answer)
    _leave(0 if answer[0] == "done" else 1)


def _leave(code: int) -> NoReturn:
    """At once: the process groups of a failed rank cannot be taken down."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _end_with_parent(results: Connection) -> None:
    with suppress(EOFError, OSError):
        results.recv()  # nothing is ever sent: it returns when the parent is gone
    os._exit(1)


def _write_to(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _share_cores(local_size: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
