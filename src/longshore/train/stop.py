"""How a run ends before its last step: a signal asks it to stop, or an error occurs. No torch.

In: SIGTERM from a scheduler that wants the machine back, Ctrl-C, or SIGHUP from a closed terminal.
Out: a flag that the loop reads at each step; all ranks agree on the step after which they stop,
save a checkpoint and exit with 128 plus the signal's number: 143, 130 or 129.

    with stop_on_signals(status) as stop, stop.after_steps(): ...     stop.is_asked: a signal came

Outside of `after_steps` there is nothing to save, so the signal raises Interrupted. A thread
receives the signals, since Python's own handlers wait while the main thread is in a collective: on
a second Ctrl-C, or if the run is stuck, the thread ends the process.

`supervised` adds the heartbeat. Who watches it depends on who started the ranks, what it says does
not (heartbeat.py). Ranks of our launcher write their beats next to their rendezvous file; the
launcher watches them and prints. Under torchrun a rank that has not moved for 30 s writes its beats
to RUN/.heartbeat; the lowest of these ranks watches and prints, and each exits by itself if it was
asked to stop and is stuck.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from longshore.train.heartbeat import (
    ANSWER_S,
    NOTICE_S,
    RankStatus,
    Watch,
    beating,
    ended,
    gave_up,
    is_stuck,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TWICE_S = 0.5  # one Ctrl-C may arrive twice: from the terminal and from the launcher
START_S = 5.0  # for the main thread to answer before the first step
LOOK_S = 0.5
SHOW_CURSOR = "\x1b[?25h"
QUIT = "quit at once, without a checkpoint"


class StoppedError(Exception):
    """The run was asked to stop, and has stopped; the text says how to resume it."""

    def __init__(self, text: str, number: int = signal.SIGTERM) -> None:
        super().__init__(text)
        self.number = number


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command at once."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number


class RunError(Exception):
    """The run cannot continue, for a reason outside of the program; printed without a traceback."""


def exit_code(number: int) -> int:
    """The exit code of a run that a signal stopped; 0 would mean that it is finished."""
    return 128 + number


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
    numbers: Iterable[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Handles signals in a block, except those ignored from the start (nohup, the launcher).

    Only the main thread receives signals; in another the block changes nothing.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    ours = [number for number, old in before.items() if old not in (signal.SIG_IGN, None)]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def signals_raise() -> AbstractContextManager[None]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    return handling(interrupt)


class Stop:
    """Whether a signal has come, and which. status: of this rank."""

    def __init__(self, status: RankStatus) -> None:
        self.status = status
        self.number: int | None = None
        self.at = 0.0
        self.can_save = False

    @contextmanager
    def after_steps(self) -> Iterator[None]:
        """From here on a signal only sets the flag."""
        self.can_save = True
        yield

    @property
    def is_asked(self) -> bool:
        return self.number is not None

    def take(self, number: int) -> str:
        """The line to print: one for the first signal, and QUIT for a second Ctrl-C."""
        now = time.monotonic()
        if self.number is None:
            self.number, self.at = number, now
            again = " (Ctrl-C again quits at once)" if number == signal.SIGINT else ""
            return f"stopping after this step; saving{again}" if self.can_save else ""
        return QUIT if number == signal.SIGINT and now - self.at > TWICE_S else ""


@contextmanager
def stop_on_signals(
    status: RankStatus,
    *,
    report: Callable[[str], None] = lambda text: None,
    will_not_stop: Callable[[float], str] = lambda since_s: "",
) -> Iterator[Stop]:
    """Signals set a flag instead of ending the process; only the main thread can receive them.

    will_not_stop: given the seconds since the signal, returns a text if the run is stuck for good.
    """
    stop = Stop(status)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not stop.can_save:
            raise Interrupted(number)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    arguments = (stop, reader, report, will_not_stop)
    thread = threading.Thread(target=_answer, args=arguments, name="longshore-signals", daemon=True)
    thread.start()
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with handling(interrupt):
            yield stop
    finally:
        signal.set_wakeup_fd(old)
        os.close(writer)  # which ends the thread
        thread.join()
        os.close(reader)


def _answer(
    stop: Stop, reader: int, report: Callable[[str], None], will_not_stop: Callable[[float], str]
) -> None:
    """Receives the signals at once, whatever the main thread does, until the pipe is closed."""
    while True:
        ready, _, _ = select.select([reader], [], [], LOOK_S if stop.is_asked else None)
        if not ready:
            assert stop.number is not None
            if text := _overdue(stop, will_not_stop):
                report(text)
                leave(exit_code(stop.number))
            continue
        numbers = os.read(reader, 64)
        if not numbers:
            return
        for number in filter(SIGNALS.__contains__, numbers):
            if text := stop.take(number):
                report(text)
            if text == QUIT:
                leave(exit_code(number))


def _overdue(stop: Stop, will_not_stop: Callable[[float], str]) -> str:
    """Why a process whose main thread never answers has to be ended, or ""."""
    since_s = time.monotonic() - stop.at
    if not stop.can_save:
        return "stopped before the first step" if since_s > START_S else ""
    return will_not_stop(since_s) if since_s > ANSWER_S else ""


def leave(code: int) -> NoReturn:
    """Ends the process from any thread, and shows the cursor again."""
    with suppress(OSError, ValueError, AttributeError):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
    os._exit(code)  # without a flush, which may wait for a lock of the main thread


FOLDER = ".heartbeat"
QUIET_S = 30.0
PERIOD_S = 5.0
SILENT_S = 3 * PERIOD_S


def supervised(
    status: RankStatus, *, rank: int, ranks: int, address: str
) -> AbstractContextManager[Stop]:
    """address: the rendezvous, a file of our launcher or torchrun's environment."""
    if ranks == 1:
        return stop_on_signals(status, report=_print_line)
    if address.startswith("file://"):
        return _launched(status, rank, Path(address.removeprefix("file://")).parent)
    return _Peers(status, rank, ranks).supervised()


@contextmanager
def _launched(status: RankStatus, rank: int, folder: Path) -> Iterator[Stop]:
    with beating(status, lambda: folder, rank=rank), stop_on_signals(status) as stop:
        yield stop


class _Peers:
    """The ranks of torchrun, seen from one of them."""

    def __init__(self, status: RankStatus, rank: int, ranks: int) -> None:
        self.status = status
        self.rank = rank
        self.ranks = ranks
        self.watch: Watch | None = None

    @contextmanager
    def supervised(self) -> Iterator[Stop]:
        beats = beating(
            self.status,
            self._folder,
            rank=self.rank,
            quiet_s=QUIET_S,
            after=self._look,
            period_s=PERIOD_S,
        )
        signals = stop_on_signals(self.status, report=self._report, will_not_stop=self._stuck)
        with beats, signals as stop:
            try:
                yield stop
            except RuntimeError as error:
                if self.watch is None or not is_time_out(str(error)):
                    raise
                text = gave_up(self.watch.description(), self.status.folder)
                raise RunError(text) from None

    def _report(self, text: str) -> None:
        if self.rank == (self.watch.speaker() if self.watch is not None else 0):
            _print_line(text)

    def _folder(self) -> Path | None:
        return Path(self.status.folder, FOLDER) if self.status.folder else None

    def _look(self) -> None:
        """Called by the heartbeat thread while this rank does not move."""
        folder = self._folder()
        assert folder is not None
        if self.watch is None:
            self.watch = Watch(folder, self.ranks, missing_is_stuck=True, silent_s=SILENT_S)
        self.watch.look()
        if text := self.watch.notice(NOTICE_S):
            self._report(text)

    def _stuck(self, since_s: float) -> str:
        """Decided from its own status: the others write theirs only later."""
        status, watch = self.status, self.watch
        if not is_stuck(status.phase, status.unmoved_s, status.longest_s):
            return ""
        state = watch.description() if watch is not None else f"it hangs in {status.phase}"
        return ended(state, status.folder)


def is_time_out(text: str) -> bool:
    """Whether an error text is that of a collective that timed out."""
    return "timed out" in text.lower() or "timeout" in text.lower()


def _print_line(text: str) -> None:
    sys.stderr.write(f"longshore: {text}\n")
    sys.stderr.flush()
