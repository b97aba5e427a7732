"""How a run ends before its last step: told to stop, or unable to go on. No torch.

In: SIGTERM, from a scheduler that wants the machine back. Out: a flag that the loop asks for at
each step; all ranks agree on the step after which they stop, save a checkpoint and end with 143.

    with stop_on_sigterm() as asked: ...      asked() is True from the signal on
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that was told to stop: 0 would say that it is finished."""


class StoppedError(Exception):
    """The run was told to stop, and has; its text says how to go on."""


class RunError(Exception):
    """The run cannot go on, for a reason outside of the program. Its text is for people."""


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """A flag in place of the end of the process; threads other than the main one get no signal."""
    asked = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
