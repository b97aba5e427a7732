"""How a run is watched, and how it ends before its last step. No torch.

In: a RankStatus, which a rank's main thread updates (a few assignments, no communication), and the
signals SIGTERM, Ctrl-C and SIGHUP. Out: a file for each rank that a thread rewrites once a second,
its heartbeat; a line that names the rank that hangs; a flag that the loop reads at each step. All
ranks agree on the step after which they stop, save and exit with 128 plus the signal's number.

    with supervised(status, rank=3, ranks=4, address=address) as stop:
        status.at("forward", step=12, round=2)     others read Beat(rank=3, step=12, …)

    rank 3 has not moved for 60 s: step 12, round 2, forward (its process does not run); the others
    wait for it: step 12, round 2, backward, in all_reduce

The stuck rank is one without a beat; else one that is in no collective while others are; else the
one that is behind. Slow is not stuck: all limits grow with the longest time between two moves of a
rank, the first step excepted. Ranks of our launcher write their beats beside their rendezvous file,
and the launcher watches (cli/launch.py). Under torchrun a rank that has not moved for 30 s writes
to RUN/.heartbeat; the lowest such rank prints, and each exits by itself if it was asked to stop.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from longshore.files import FULL, free_bytes, reason, size_text, way_out
from longshore.train.checkpoint_files import remove_leftovers

PERIOD_S = 1.0
WARM_STEPS = 2  # changes of the step before times count: the first step compiles


class RankStatus:
    """Where a rank is in the run, see Beat; its main thread updates it, other threads only read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = self.round = self.moves = 0
        self.phase = "starting"
        self.longest_s = 0.0
        self.folder = ""
        self.on_first_step: Callable[[], None] = lambda: None
        """Called when the first step begins; from then on a run that is asked to stop saves."""
        self._clock = clock
        self._steps = 0
        self._moved = clock()

    def at(self, phase: str, *, step: int | None = None, round: int = 0) -> None:
        """step: from 1; None: unchanged. round: from 1; 0: in none."""
        now = self._clock()
        if self._steps >= WARM_STEPS:
            self.longest_s = max(self.longest_s, now - self._moved)
        is_first_step = not self.step and bool(step)
        if step is not None and step != self.step:
            self.step = step
            self._steps += 1
        self.round, self.phase = round, phase
        self._moved = now
        self.moves += 1
        if is_first_step:
            self.on_first_step()

    @property
    def unmoved_s(self) -> float:
        return self._clock() - self._moved


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's status as other processes read it."""

    rank: int
    """Whose status it is."""
    count: int
    """Beats so far."""
    step: int
    """From 1; 0 before the first."""
    round: int
    """From 1; 0 outside of rounds."""
    phase: str
    """What it does, such as forward."""
    moves: int
    """How often its status changed: the same on all ranks at the same point of the run."""
    unmoved_s: float
    """Seconds since the last move."""
    longest_s: float
    """The longest time between two moves, after the first step."""
    waits: str
    """The collective the rank is in, or ""."""
    folder: str
    """The run's, or "" until it is known."""

    @property
    def progress(self) -> str:
        """step 12, round 2, forward."""
        step = [f"step {self.step}"] if self.step else []
        return ", ".join([*step, *([f"round {self.round}"] if self.round else []), self.phase])


SHARED = ("step", "round", "phase", "moves", "unmoved_s", "longest_s", "folder")
"""What a Beat has from a RankStatus."""


def beat_path(folder: Path, rank: int) -> Path:
    return folder / f"beat-{rank}"


def read_beat(path: Path) -> Beat | None:
    """None if there is none, or if it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return Beat(**json.loads(path.read_text(encoding="utf-8")))
    return None


@contextmanager
def beating(
    status: RankStatus,
    folder: Callable[[], Path | None],
    *,
    rank: int,
    quiet_s: float = 0.0,
    after: Callable[[], None] = lambda: None,
    period_s: float = PERIOD_S,
) -> Iterator[None]:
    """Writes the calling thread's status until the block ends.

    folder: returns None as long as there is no folder to write to. quiet_s: nothing is written
    while the status moved within these seconds. after: called by the thread after each write.
    """
    main, stop, wake = threading.get_ident(), threading.Event(), threading.Event()
    status.on_first_step = wake.set

    def keep_beating() -> None:
        count, may_exist = 0, True
        while True:
            wake.clear()
            if stop.is_set():
                return
            count += 1
            where = folder()
            if where is not None and status.unmoved_s >= quiet_s:
                beat = {name: getattr(status, name) for name in SHARED}
                beat |= {"rank": rank, "count": count, "waits": collective_of(main)}
                _write(beat_path(where, rank), beat)
                may_exist = True
                after()
            elif where is not None and may_exist:
                _remove(beat_path(where, rank))
                may_exist = False
            wake.wait(period_s)

    thread = threading.Thread(target=keep_beating, name="longshore-heartbeat", daemon=True)
    thread.start()
    try:
        yield
        where = folder()
    except BaseException:
        where = None  # its last beat stays, to show where it failed
        raise
    finally:
        stop.set()
        wake.set()
        thread.join(period_s)
        if where is not None:
            _remove(beat_path(where, rank))


def _write(path: Path, beat: dict[str, object]) -> None:
    """Atomically, so that nobody reads half of it; a full disk loses the beat, not the run."""
    partial = path.with_name(f".{path.name}")
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        partial.write_text(json.dumps(beat), encoding="utf-8")
        os.replace(partial, path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def collective_of(thread: int) -> str:
    """The collective that a thread is in, such as all_reduce, or "".

    Read from its innermost stack frames: those of torch, up to the first of another package.
    """
    frame = sys._current_frames().get(thread)
    name = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != "torch":
            break
        if module.startswith("torch.distributed") and frame.f_code.co_name != "wrapper":
            name = name or frame.f_code.co_name
        frame = frame.f_back
    return name


NOTICE_S = 60.0  # without a move, until it is reported
STUCK_S = 20.0  # without a move, until a run that was asked to stop is ended
UNTIMED_S = 600.0  # the same before the second step, which may be as slow as the first
SILENT_S = 10.0  # without a beat, which comes every second
ANSWER_S = 2.0  # every run that was asked to stop has this long
SLOWER = 3.0  # limits are at least this many times the longest time between two moves
SAVING = "saving"
"""The phase in which a run that was asked to stop is never ended."""


class Watch:
    """Reads the beats of all ranks from a folder.

    missing_is_stuck: a rank without a file is stuck. So it is where ranks write only while they do
    not move; elsewhere such a rank has not started, or has ended.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        *,
        missing_is_stuck: bool = False,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.beats: dict[int, Beat] = {}
        self.missing: list[int] = []
        self._missing_is_stuck = missing_is_stuck
        self._silent_s = silent_s
        self._clock = clock
        self._heard: dict[int, float] = {}
        self._next_notice_s = 0.0

    def look(self) -> None:
        """Reads all beats."""
        now = self._clock()
        self.missing = []
        for rank in range(self.ranks):
            beat = read_beat(beat_path(self.folder, rank))
            before = self.beats.get(rank)
            if beat is None:
                self.missing.append(rank)
                self.beats.pop(rank, None)
            elif before is None or before.count != beat.count:
                self.beats[rank] = beat
                self._heard[rank] = now

    @property
    def has_begun(self) -> bool:
        """Whether any rank has reached its first step."""
        return any(beat.step for beat in self.beats.values())

    @property
    def folder_of_run(self) -> str:
        return next((beat.folder for beat in self.beats.values() if beat.folder), "")

    def speaker(self) -> int:
        """The lowest rank that beats: it prints for all."""
        silent = self._silent()
        return min((rank for rank in self.beats if rank not in silent), default=0)

    def unmoved_s(self) -> float:
        """Seconds since any rank moved; 0 until all ranks have a beat."""
        if self.missing and not self._missing_is_stuck:
            return 0.0
        return min((self._since(beat) for beat in self.beats.values()), default=0.0)

    def notice(self, notice_s: float = NOTICE_S) -> str:
        """A line to print now, or ""."""
        unmoved = self.unmoved_s()
        if unmoved < max(notice_s, SLOWER * self._longest_s()):
            self._next_notice_s = 0.0
            return ""
        if unmoved < self._next_notice_s:
            return ""
        self._next_notice_s = 2 * unmoved
        return self.description()

    def will_not_stop(self, since_s: float) -> bool:
        """Whether a run is stuck for good. since_s: seconds since it was asked to stop."""
        if since_s < ANSWER_S:
            return False
        phase = SAVING if any(beat.phase == SAVING for beat in self.beats.values()) else ""
        is_hung = is_stuck(phase, self.unmoved_s(), self._longest_s())
        return is_hung or bool(self._silent())

    def stuck(self, among: Collection[int] | None = None) -> list[int]:
        """The ranks that the others wait for; all ranks, if that is unclear.

        among: the candidates, where the others have already given up.
        """
        if self._missing_is_stuck and self.missing:
            return self.missing
        if silent := self._silent():
            return silent
        beats = [beat for beat in self.beats.values() if among is None or beat.rank in among]
        idle = [beat for beat in beats if not beat.waits]
        if idle and len(idle) < len(beats):
            beats = idle
        behind = min((beat.moves for beat in beats), default=0)
        return [beat.rank for beat in beats if beat.moves == behind]

    def description(self, among: Collection[int] | None = None) -> str:
        """Which ranks do not move, where they are, and where the others are."""
        ranks = self.stuck(among)
        beats = [self.beats[rank] for rank in ranks if rank in self.beats]
        others = [beat for rank, beat in sorted(self.beats.items()) if rank not in ranks]
        waiting = f"; the others wait for it: {others[0].progress}" if others else ""
        waiting += f", in {others[0].waits}" if others and others[0].waits else ""
        seconds = f"{min(map(self._since, beats or others), default=0.0):.0f} s"
        if not beats:
            return f"{ranks_in_words(ranks)} gave no sign of life for {seconds}{waiting}"
        has = f"{ranks_in_words(ranks)} {'have' if len(ranks) > 1 else 'has'} not"
        stopped = " (its process does not run)" if ranks[0] in self._silent() else ""
        return (
            f"{has if others else 'no rank has'} moved for {seconds}: {beats[0].progress}{stopped}"
            f"{waiting}"
        )

    def _since(self, beat: Beat) -> float:
        return beat.unmoved_s + self._clock() - self._heard[beat.rank]

    def _silent(self) -> list[int]:
        now = self._clock()
        return [rank for rank in sorted(self.beats) if now - self._heard[rank] > self._silent_s]

    def _longest_s(self) -> float:
        return max((beat.longest_s for beat in self.beats.values()), default=0.0)


def is_stuck(phase: str, unmoved_s: float, longest_s: float) -> bool:
    """Whether what was asked to stop is to be ended. longest_s: between two moves; 0: unknown."""
    limit = max(STUCK_S, SLOWER * longest_s) if longest_s else UNTIMED_S
    return phase != SAVING and unmoved_s >= limit


def ranks_in_words(ranks: Sequence[int]) -> str:
    """rank 3, or ranks 3, 5 and 7."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"


def last_saved(folder: str) -> str:
    """A text about the newest checkpoint of a run."""
    steps = sorted(Path(folder, "checkpoints").glob("step-*")) if folder else []
    if not steps:
        return "no checkpoint was written"
    step = int(steps[-1].name.removeprefix("step-"))
    return f"the last checkpoint is of step {step}; resume with --resume {folder}"


def ended(state: str, folder: str) -> str:
    """The text about a run that was asked to stop and could not. state: the ranks' description."""
    return f"ended without a checkpoint of this step: {state}; {last_saved(folder)}"


def gave_up(state: str, folder: str) -> str:
    """The text about a run whose ranks waited too long for one of them."""
    waited = "the others gave up after parallel.timeout_min minutes"
    return f"{state}; {waited}; {last_saved(folder)}"


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


@contextmanager
def writing(run: Path, *, then: str = "", needed: int = 0) -> Iterator[None]:
    """Raises RunError instead of OSError, after removing partial saves that may fill the disk.

    then: the advice once the cause is gone; by default, to resume the run. needed: bytes of all
    that is written, 0 if unknown.
    """
    try:
        yield
    except OSError as error:
        remove_leftovers(run)
        after = then or f"resume with --resume {run}"
        # When a file is copied, the second name is that of the new one.
        file, why = error.filename2 or error.filename or run, reason(error)
        if needed and error.errno in FULL and (free := free_bytes(run)) is not None:
            why += f": it takes {size_text(needed)}, and {size_text(free)} are free without it"
        raise RunError(
            f"{file} cannot be written ({why}); {way_out(error)}, then {after}"
        ) from None


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
        """Whether a signal only sets the flag; before the first step it raises Interrupted."""

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

    A thread answers them, since Python's own handlers wait while the main thread is in a
    collective; on a second Ctrl-C, or if the run is stuck, it ends the process.
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
            since_s, text = time.monotonic() - stop.at, ""
            if not stop.can_save:
                text = "stopped before the first step" if since_s > START_S else ""
            elif since_s > ANSWER_S:
                text = will_not_stop(since_s)
            if text:
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


def leave(code: int) -> NoReturn:
    """Ends the process from any thread, and shows the cursor again."""
    with suppress(OSError, ValueError, AttributeError):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
    os._exit(code)  # without a flush, which may wait for a lock of the main thread


HEARTBEATS = ".heartbeat"
QUIET_S = 30.0
WATCH_PERIOD_S = 5.0
TORCHRUN_SILENT_S = 3 * WATCH_PERIOD_S


@contextmanager
def supervised(status: RankStatus, *, rank: int, ranks: int, address: str) -> Iterator[Stop]:
    """address: the rendezvous, a file of our launcher or torchrun's environment."""
    with ExitStack() as opened:
        if ranks == 1:
            signals = stop_on_signals(status, report=_print_line)
        elif address.startswith("file://"):
            folder = Path(address.removeprefix("file://")).parent
            opened.enter_context(beating(status, lambda: folder, rank=rank))
            signals = stop_on_signals(status)
        else:
            signals = _Peers(status, rank, ranks).supervised()
        yield opened.enter_context(signals)


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
            period_s=WATCH_PERIOD_S,
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
        return Path(self.status.folder, HEARTBEATS) if self.status.folder else None

    def _look(self) -> None:
        """Called by the heartbeat thread while this rank does not move."""
        folder = self._folder()
        assert folder is not None
        if self.watch is None:
            self.watch = Watch(
                folder, self.ranks, missing_is_stuck=True, silent_s=TORCHRUN_SILENT_S
            )
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
