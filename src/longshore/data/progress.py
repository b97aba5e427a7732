"""Progress of `prepare`, for people: a bar on a terminal, or a line for each tenth.

In: how many bytes of how many are read, again and again. Out: text on a stream:

    prepared 10 % of 812.4 MB
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import TextIO

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the total."""


@contextlib.contextmanager
def show_progress(stream: TextIO) -> Iterator[OnProgress]:
    """A bar on a terminal; elsewhere, or without rich, a line for each tenth."""
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        yield _tenths(stream)
        return
    with contextlib.ExitStack() as shown:
        bars: list[OnProgress] = []

        def report(done: int, total: int) -> None:
            if not bars:  # nothing is shown where nothing is left to do
                bars.append(_bar(stream, shown))
            bars[0](done, total)

        yield report


def _bar(stream: TextIO, shown: contextlib.ExitStack) -> OnProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("preparing", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = shown.enter_context(Progress(*columns, console=Console(file=stream)))
    task = bar.add_task("", total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def _tenths(stream: TextIO) -> OnProgress:
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        if (tenth := 10 * done // max(total, 1)) > shown:
            shown = tenth
            stream.write(f"prepared {10 * tenth} % of {total / 1e6:,.1f} MB\n")
            stream.flush()

    return report
