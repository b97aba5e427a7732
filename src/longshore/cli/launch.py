"""Starts the ranks of a run on this machine, and watches them.

In: a function, a config and a number of ranks. Out: the function's work done on every rank, or the
error of the rank that failed first: a ValueError, RunError or StoppedError as it is, anything else
as RankError with that rank's traceback. With 4 ranks on 2 cores each rank computes with 1 thread.

The processes are forked from a server that has imported torch once; one rank alone runs here. When
a rank fails or dies the others are killed, and all end when this process does. Only this process
handles signals: it asks the ranks to stop after their step; a second Ctrl-C kills them, and so does
a rank that hangs once it was asked. Rank 0 writes to the terminal, the others to files.

torch's elastic launcher cannot stand in for it: it imports torch in this process (2.6 s and 160 MB
on a slow machine), hands errors on as text without their type, and kills ranks 30 s after a signal,
however long their checkpoint takes. Under torchrun, which is that launcher, the ranks watch each
other (train/supervision.py), by the same rules and in the same words.
"""

import faulthandler
import importlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import FrameType
from typing import NoReturn

from longshore.cli.environment import exceeded_limit, lossy_output
from longshore.cli.options import say
from longshore.config.schema import RunConfig
from longshore.distributed.process_group import Ranks, alone, loopback, loopback_variables
from longshore.files import temporary_folder
from longshore.train.supervision import (
    NOTICE_S,
    QUIT,
    SHOW_CURSOR,
    Interrupted,
    RankStatus,
    RunError,
    Stop,
    StoppedError,
    Watch,
    ended,
    gave_up,
    handling,
    is_time_out,
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
OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)  # sent to all processes: the launcher alone decides


class RankError(Exception):
    """A rank raised what is not the user's mistake, or died. Its text is for people."""


class DeadRankError(RankError):
    """The process of a rank ended without an answer."""


CAUSES = (Interrupted, ValueError, RunError, StoppedError, DeadRankError, RankError)
"""Which of several ranks' errors is raised: the first of these."""


def gpu_count() -> int:
    """GPUs that this process may use, without asking torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(glob("/dev/nvidia[0-9]*"))


def ranks_of_run(
    asked: int | None, config: RunConfig, place: Ranks | None, *, way_out: str = "lower --ranks"
) -> int:
    """How many ranks the run has. asked: with --ranks. way_out: of too many; "" allows them."""
    if place is None:
        gpus = 0 if config.train.device == "cpu" else gpu_count()
        ranks = asked or config.parallel.ranks or gpus or 1
        if way_out:
            check_ranks(ranks, way_out=way_out)
        return ranks
    if asked not in (None, place.world_size):
        raise ValueError(
            f"--ranks is {asked}, but torchrun started {place.world_size} processes; leave "
            "--ranks out"
        )
    return place.world_size


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
    if ranks == 1:
        with alone() as only_rank, loopback():
            work(config, only_rank)
        return
    with temporary_folder() as folder:
        processes = _RankProcesses(work, config, ranks, Path(folder))
        try:
            with handling(processes.handle_signal):
                processes.wait()
        finally:
            processes.end()


class _RankProcesses:
    """The processes of a run, and the errors of ranks that have ended, in the order they came."""

    def __init__(self, work: Work, config: RunConfig, ranks: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        with handling(signal.SIG_IGN, OF_TERMINAL):  # the server and the ranks inherit it
            ensure_running()
        self.folder = folder
        self.pending: dict[Connection, int] = {}
        self.processes: list[ForkServerProcess] = []
        self.watch = Watch(folder, ranks)
        self.stop = Stop(RankStatus())
        self.unprinted = ""  # a signal may come while something is printed, and cannot print itself
        self.errors: list[BaseException] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = Ranks(rank, ranks, rank, ranks, f"file://{folder}/store")
            process = context.Process(target=_work, args=(work, config, place, theirs), daemon=True)
            try:
                process.start()
            except (EOFError, OSError):
                for name in PRELOAD:  # the server has failed in its imports: here they say why
                    importlib.import_module(name)
                raise
            theirs.close()
            self.processes.append(process)
            self.pending[ours] = rank

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """The ranks agree on a step, save a checkpoint and end; at once before the first step."""
        self.watch.look()
        self.stop.can_save = self.watch.has_begun
        text = self.stop.take(number)
        if text == QUIT:
            raise StoppedError(QUIT, number)
        if not self.stop.can_save:
            raise Interrupted(number)
        self.unprinted = text or self.unprinted
        for process in self.processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def wait(self) -> None:
        """Until all ranks have ended or one has failed; raises the error that caused the others."""
        deadline = math.inf
        while self.pending and (left := deadline - time.monotonic()) > 0:
            finished = connection.wait([*self.pending], min(POLL_S, left))
            text, self.unprinted = self.unprinted, ""
            if text:
                say(f"longshore: {text}", to_stderr=True)
            for ready in finished:
                assert isinstance(ready, Connection)
                self._receive(ready)
            if deadline == math.inf:
                if any(not isinstance(error, StoppedError) for error in self.errors):
                    deadline = time.monotonic() + GRACE_S
                else:
                    self._check_progress()
        if self.errors:
            self._raise_cause()

    def _check_progress(self) -> None:
        """Reports a rank without progress; ends a run that was asked to stop and cannot."""
        stop, watch = self.stop, self.watch
        watch.look()
        if stop.number is not None and watch.will_not_stop(time.monotonic() - stop.at):
            raise StoppedError(ended(watch.description(), watch.folder_of_run), stop.number)
        if text := watch.notice(NOTICE_S):
            say(f"longshore: {text}", to_stderr=True)

    def _receive(self, ready: Connection) -> None:
        """Takes the error of a rank that has ended, if there is one."""
        rank = self.pending.pop(ready)
        try:
            error = ready.recv()
        except (EOFError, OSError):
            error = DeadRankError(f"rank {rank} {self._death_report(rank)}")
        ready.close()
        if error is not None:
            self.errors.append(error)

    def _raise_cause(self) -> NoReturn:
        """A rank that refused or died makes others fail: the cause comes first."""
        error = min(self.errors, key=lambda error: CAUSES.index(type(error)))
        if isinstance(error, Interrupted | StoppedError) and self.stop.number is not None:
            error.number = self.stop.number  # they all heard SIGTERM, whatever came here
        if isinstance(error, RankError) and is_time_out(str(error)):
            self.watch.look()
            among = [rank for rank in self.pending.values() if rank in self.watch.beats]
            if among:  # the others timed out waiting for these
                raise RunError(gave_up(self.watch.description(among), self.watch.folder_of_run))
        raise error

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
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        killed = [process for process in self.processes if process.is_alive()]
        for process in killed:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        if killed and sys.stdout.isatty():
            print(end=SHOW_CURSOR, flush=True)


def _work(work: Work, config: RunConfig, ranks: Ranks, results: Connection) -> None:
    """One rank, from its first to its last line; sends None or an error that its parent raises."""
    for number in OF_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    os.environ.update({**loopback_variables(), **os.environ})
    threading.Thread(target=_end_with_parent, args=(results,), daemon=True).start()
    if ranks.rank:
        log = Path(ranks.rendezvous.removeprefix("file://")).with_name(f"rank{ranks.rank}.log")
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
    faulthandler.enable()
    error: BaseException | None = None
    try:
        if "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_size))
        with lossy_output():
            work(config, ranks)
    except (Interrupted, StoppedError) as caught:
        error = caught
    except RunError as caught:  # or of a subclass, which the parent may not know
        error = RunError(str(caught))
    except ValueError as caught:
        error = ValueError(str(caught))
    except BaseException:  # also a KeyboardInterrupt of a user's code: ranks hear no Ctrl-C
        text = traceback.format_exc()
        error = RankError(f"rank {ranks.rank} failed:\n{text}")
        if why := exceeded_limit(text):
            error = RunError(f"rank {ranks.rank}: {why}")
    with suppress(OSError):
        results.send(error)
    flush_and_exit(0 if error is None else 1)


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
