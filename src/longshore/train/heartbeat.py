"""Where a rank stands, written down once a second, so that one that hangs can be named. No torch.

In: a RankStatus, which the rank's main thread moves along: a few assignments, no communication.
Out: a file for each rank that a thread rewrites, also while the main thread is in a collective:

    status = RankStatus()
    with beating(status, lambda: Path("/tmp/longshore-x"), rank=3):
        status.at("forward", step=12, round=2)

Beat(rank=3, step=12, round=2, phase="forward", …) is what others read; `longshore.train.watch` says
which of several ranks the others wait for.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

PERIOD_S = 1.0
WARM_STEPS = 2  # changes of the step before times count: the first step compiles


class RankStatus:
    """A rank's; its main thread moves it, other threads only read.

    moves: how often it moved, which is the same on all ranks at the same status. longest_s: between
    two moves, after the first step. folder: of the run, once it is known. on_first_step: called at
    once when the first step begins, from which on a run that is told to stop saves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = 0
        self.round = 0
        self.phase = "starting"
        self.moves = 0
        self.longest_s = 0.0
        self.folder = ""
        self.on_first_step: Callable[[], None] = lambda: None
        self._clock = clock
        self._steps = 0
        self._moved = clock()

    def at(self, phase: str, *, step: int | None = None, round: int = 0) -> None:
        """step: from 1, kept where it is None. round: from 1; 0: in none."""
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
    """A rank's status as others read it. count: of beats. waits: the collective it is in, or ""."""

    rank: int
    count: int
    step: int
    round: int
    phase: str
    moves: int
    unmoved_s: float
    longest_s: float
    waits: str
    folder: str

    @property
    def words(self) -> str:
        """step 12, round 2, forward."""
        step = [f"step {self.step}"] if self.step else []
        return ", ".join([*step, *([f"round {self.round}"] if self.round else []), self.phase])


def beat_path(folder: Path, rank: int) -> Path:
    return folder / f"beat-{rank}"


def read_beat(path: Path) -> Beat | None:
    """None where there is none, or one that cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return Beat(**{field.name: content[field.name] for field in fields(Beat)})
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
    """Writes the calling thread's status, until the end of the block.

    folder: None as long as there is none to write into. quiet_s: nothing is written while the
    status moved within these seconds. after: called by the thread when it has written.
    """
    main, stop, wake = threading.get_ident(), threading.Event(), threading.Event()
    status.on_first_step = wake.set

    def beat() -> None:
        count, may_exist = 0, True
        while True:
            wake.clear()
            if stop.is_set():
                return
            count += 1
            where = folder()
            if where is not None and status.unmoved_s >= quiet_s:
                _write(beat_path(where, rank), _beat(status, rank, count, main))
                may_exist = True
                after()
            elif where is not None and may_exist:
                _remove(beat_path(where, rank))
                may_exist = False
            wake.wait(period_s)

    thread = threading.Thread(target=beat, name="longshore-heartbeat", daemon=True)
    thread.start()
    try:
        yield
        where = folder()
    except BaseException:
        where = None  # its last beat stays, for whoever asks what went wrong
        raise
    finally:
        stop.set()
        wake.set()
        thread.join(period_s)
        if where is not None:
            _remove(beat_path(where, rank))


def _beat(status: RankStatus, rank: int, count: int, main: int) -> Beat:
    return Beat(
        rank=rank,
        count=count,
        step=status.step,
        round=status.round,
        phase=status.phase,
        moves=status.moves,
        unmoved_s=status.unmoved_s,
        longest_s=status.longest_s,
        waits=collective_of(main),
        folder=status.folder,
    )


def _write(path: Path, beat: Beat) -> None:
    """At once, so that nobody reads half of it; a full disk costs the beat, not the run."""
    partial = path.with_name(f".{path.name}")
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        partial.write_text(json.dumps(asdict(beat)), encoding="utf-8")
        os.replace(partial, path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def collective_of(thread: int) -> str:
    """The collective that a thread is in, such as all_reduce; "" if it is elsewhere.

    Read off its innermost calls: those of torch, up to the first that is not.
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
