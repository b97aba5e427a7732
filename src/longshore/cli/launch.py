"""Starts the ranks of a run on this machine, or reads this process's rank from torchrun.

In: a function, a config and a number of ranks. Out: the function's work done on every rank, or the
error of the rank that failed first: a ValueError, RunError or StoppedError as it is, anything else
as RankError with that rank's traceback. With 4 ranks on 2 cores each rank computes with 1 thread.

The processes are forked from a server that has imported torch once; one rank alone runs here. They
meet through a file and talk over the loopback. When a rank fails or dies the others are killed, and
all end when this process does, for whatever reason. Only this process handles signals: it asks the
ranks to stop, which they do after their step; a second Ctrl-C kills them, and so does a rank that
hangs once it was asked. A rank that makes no progress before that is only reported, with the status
that it wrote itself. Rank 0 writes to the terminal, the others to a file that is shown only if they
die.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import FrameType
from typing import NoReturn

from longshore.cli.environment import exceeded_limit, lossy_output, safe_path
from longshore.cli.options import say
from longshore.config.schema import RunConfig
from longshore.files import temporary_folder
from longshore.run.ranks import Ranks, loopback, loopback_variables
from longshore.train.heartbeat import NOTICE_S, RankStatus, Watch, last_saved
from longshore.train.stop import (
    SHOW_CURSOR,
    Interrupted,
    RunError,
    Stop,
    StoppedError,
    gave_up,
    heard_signals,
    is_time_out,
    stopping,
)

Work = Callable[[RunConfig, Ranks], None]

PRELOAD = (
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",  # a first backward imports it, for seconds
    "longshore.run.trainer",
)
GRACE_S = 1.0  # for the rank whose error it is, once another has failed of it
END_S = 5.0  # for ranks to end by themselves
POLL_S = 1.0  # between two checks of the ranks' progress
SHOWN = 4000  # characters of what a dead rank wrote
RANKS_PER_CORE = 8
FEW_RANKS = 16
FATAL = ("refused", "run error", "failed", "died")
OUTCOMES = (*FATAL, "stopped")


class RankError(Exception):
    """A rank raised what is not the user's mistake, or died. Its text is for people."""


def gpu_count() -> int:
    """GPUs that this process may use, without asking torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(glob("/dev/nvidia[0-9]*"))


def check_asked_ranks(asked: int | None, place: Ranks) -> None:
    """Refuses --ranks that differ from the processes torchrun has started."""
    if asked not in (None, place.world_size):
        raise ValueError(
            f"--ranks is {asked}, but torchrun started {place.world_size} processes; leave "
            "--ranks out"
        )


def check_ranks(ranks: int, *, way_out: str) -> None:
    """Refuses far more processes than this machine has cores."""
    cores = len(os.sched_getaffinity(0))
    most = max(FEW_RANKS, RANKS_PER_CORE * cores)
    if ranks > most:
        raise ValueError(
            f"{ranks} ranks are too many for this machine with {cores} cores; the limit is {most}; "
            f"{way_out}"
        )


def launch(work: Work, config: RunConfig, ranks: int) -> None:
    """Calls work(config, ranks) on each rank; `work` is a function at module level."""
    with temporary_folder() as folder:
        if ranks == 1:
            with loopback():
                work(config, _local(0, 1, folder))
            return
        processes = _RankProcesses(work, config, ranks, folder)
        try:
            with _signals(processes.handle_signal):
                processes.wait()
        finally:
            processes.end()


def _local(rank: int, ranks: int, folder: str) -> Ranks:
    return Ranks(rank, ranks, rank, ranks, f"file://{folder}/store")


def _start_server(context: ForkServerContext) -> None:
    """Starts it ignoring what a terminal sends to all processes: this one decides."""
    context.set_forkserver_preload(list(PRELOAD))
    with _handled((signal.SIGINT, signal.SIGHUP), signal.SIG_IGN), safe_path():
        ensure_running()


@contextmanager
def _signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Has the signals that stop a run call `handle`."""

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    with _handled(heard_signals(), handler):
        yield


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals],
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> Iterator[None]:
    """Handles signals in a block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _preload_here(error: Exception) -> NoReturn:
    """The server has failed in its imports: repeats them here, where they raise the cause."""
    for name in PRELOAD:
        importlib.import_module(name)
    raise error


class _RankProcesses:
    """The processes of a run, and the outcome of each rank that has ended."""

    def __init__(self, work: Work, config: RunConfig, ranks: int, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        _start_server(context)
        self.folder = Path(folder)
        self.pending: dict[Connection, int] = {}
        self.processes: list[ForkServerProcess] = []
        self.watch = Watch(self.folder, ranks)
        self.stop = Stop(RankStatus())
        self.unprinted = ""  # a signal may come while something is printed, and cannot print itself
        self.outcomes: dict[str, dict[int, str]] = {state: {} for state in OUTCOMES}
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

    def handle_signal(self, number: int) -> None:
        """The ranks agree on a step, save a checkpoint and end; at once before the first step."""
        is_first = not self.stop.is_asked
        is_twice = self.stop.take(number)
        self.watch.look()
        if is_twice:
            raise StoppedError("quit at once, without a checkpoint", number)
        if not self.watch.has_begun:
            raise Interrupted(number)
        if is_first:
            self.unprinted = stopping(number)
        for process in self.processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def wait(self) -> None:
        deadline: float | None = None
        while self.pending and (deadline is None or time.monotonic() < deadline):
            left = POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            finished = connection.wait([*self.pending], left)
            self._print_unprinted()
            for ready in finished:
                assert isinstance(ready, Connection)
                self._receive(ready)
            if deadline is None and any(self.outcomes[state] for state in FATAL):
                deadline = time.monotonic() + GRACE_S
            if deadline is None:
                self._check_progress()
        self._raise_first()

    def _print_unprinted(self) -> None:
        text, self.unprinted = self.unprinted, ""
        if text:
            say(f"longshore: {text}", to_stderr=True)

    def _check_progress(self) -> None:
        """Reports a rank without progress; ends a run that was asked to stop and cannot."""
        self.watch.look()
        stop = self.stop
        if stop.number is not None and self.watch.will_not_stop(time.monotonic() - stop.at):
            saved = last_saved(self.watch.folder_of_run)
            text = f"ended without a checkpoint of this step: {self.watch.description()}; {saved}"
            raise StoppedError(text, stop.number)
        if text := self.watch.notice(NOTICE_S):
            say(f"longshore: {text}", to_stderr=True)

    def _receive(self, ready: Connection) -> None:
        """Takes the outcome of a rank that has ended."""
        rank = self.pending.pop(ready)
        try:
            state, text = ready.recv()
        except (EOFError, OSError):
            state, text = "died", self._death_report(rank)
        ready.close()
        if state == "interrupted":
            raise Interrupted(self.stop.number or int(text))
        if state in self.outcomes:
            self.outcomes[state][rank] = text

    def _raise_first(self) -> None:
        """A rank that refused or died makes others fail: the cause comes first."""
        for message in self.outcomes["refused"].values():
            raise ValueError(message)
        for _, message in sorted(self.outcomes["run error"].items()):
            raise RunError(message)
        number = self.stop.number
        for _, message in sorted(self.outcomes["stopped"].items()):
            raise StoppedError(message, number or signal.SIGTERM)
        for state in ("died", "failed"):
            for rank, text in self.outcomes[state].items():
                self._raise_hung(text)
                raise RankError(f"rank {rank} {text}")

    def _raise_hung(self, text: str) -> None:
        """If ranks timed out waiting for another, that one is the cause."""
        self.watch.look()
        among = [rank for rank in self.pending.values() if rank in self.watch.beats]
        if among and is_time_out(text):
            saved = gave_up(self.watch.folder_of_run)
            raise RunError(f"{self.watch.description(among)}; {saved}")

    def _death_report(self, rank: int) -> str:
        """How a rank died, and what it wrote before."""
        process = self.processes[rank]
        process.join(END_S)
        code = process.exitcode
        text = f"ended with exit code {code}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            memory = " (is the machine out of memory?)" if name == "SIGKILL" else ""
            text = f"was ended by {name}{memory}"
        log = self.folder / f"rank{rank}.log"
        written = log.read_text(errors="replace").strip() if log.exists() else ""
        return f"{text}; it wrote:\n{written[-SHOWN:]}" if written else text

    def end(self) -> None:
        """Waits for those that end by themselves, ends the others, and gives the cursor back."""
        deadline = time.monotonic() + (0.0 if sys.exc_info()[1] else END_S)
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
    """One rank, from its first to its last line; only its parent handles the terminal's signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ.update({**loopback_variables(), **os.environ})
    threading.Thread(target=_end_with_parent, args=(results,), daemon=True).start()
    if ranks.rank:
        _write_to(Path(ranks.rendezvous.removeprefix("file://")).with_name(f"rank{ranks.rank}.log"))
    faulthandler.enable()
    try:
        _share_cores(ranks.local_size)
        with lossy_output():
            work(config, ranks)
        answer = ("done", "")
    except Interrupted as error:
        answer = ("interrupted", str(int(error.number)))
    except StoppedError as error:
        answer = ("stopped", str(error))
    except RunError as error:
        answer = ("run error", str(error))
    except ValueError as error:
        answer = ("refused", str(error))
    except BaseException:  # also a KeyboardInterrupt of a user's code: ranks hear no Ctrl-C
        text = traceback.format_exc()
        answer = ("failed", f"failed:\n{text}")
        if why := exceeded_limit(text):
            answer = ("run error", f"rank {ranks.rank}: {why}")
    with suppress(OSError):
        results.send(answer)
    flush_and_exit(0 if answer[0] == "done" else 1)


def flush_and_exit(code: int) -> NoReturn:
    """At once: the process groups of a failed rank cannot be destroyed, and threads may hang."""
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
