"""What a run shows: a live panel on a terminal, lines elsewhere, or nothing.

In: StepMetrics, one after the other, and notes. Out: text on a stream.

    with make_display("auto", 60, stream=sys.stdout) as display:
        display.update(metrics)
        display.note("wrote runs/demo-1")

As lines, the first and the last step always, and others when ten seconds have passed:

    step 1 of 60   loss 5.5407   8,312 tokens/s   efficiency 91%   grad norm 2.31   lr 8.3e-04
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from longshore.printable import printable
from longshore.train.metrics import StepMetrics

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EVERY_S = 10.0
REFRESH = 4  # times a second
RECENT = 20
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40


class Display(AbstractContextManager["Display"], Protocol):
    """Where a run reports to; a context manager that restores the terminal at its end."""

    def update(self, metrics: StepMetrics) -> None: ...
    def note(self, text: str) -> None: ...

    def phase(self, text: str) -> None:
        """What happens now, before the first step's figures."""
        self.note(text)

    def note_on_step(self, text: str) -> None:
        """A note on the last step, after that step's own figures."""
        self.note(text)


def make_display(
    kind: str,
    total_steps: int,
    *,
    stream: TextIO,
    title: str = "",
    done: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Display:
    """kind: live, plain, none, or auto. Without a terminal that can redraw, live is plain.

    done: the steps done before the run was resumed.
    """
    if kind == "none":
        return Silent()
    if kind == "plain":
        return Lines(total_steps, stream, clock)
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return Lines(total_steps, stream, clock)
    return Panel(total_steps, console, title, done=done)


def startup_notes(kind: str, *, stream: TextIO, is_first: bool) -> Callable[[str], None]:
    """Prints notes before the first step; silent on all ranks but the first."""
    return make_display(kind if is_first else "none", 0, stream=stream).note


class Silent(Display):
    """Shows nothing."""

    def update(self, metrics: StepMetrics) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class Lines(Display):
    """A line every EVERY_S seconds."""

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._progress = ProgressText(total_steps)
        self._stream, self._clock = stream, clock
        self._shown_at: float | None = None
        self._shown: StepMetrics | None = None

    def update(self, metrics: StepMetrics) -> None:
        self._progress.add(metrics)
        now = self._clock()
        is_due = self._shown_at is None or now - self._shown_at >= EVERY_S
        if is_due or metrics.step == self._progress.total or metrics.skipped:
            self._show(metrics, now)

    def note(self, text: str) -> None:
        self._print(printable(text))

    def note_on_step(self, text: str) -> None:
        self._show_last()
        self.note(text)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._show_last()

    def _show_last(self) -> None:
        last = self._progress.last
        if last is not None and last is not self._shown:
            self._show(last, self._clock())

    def _show(self, metrics: StepMetrics, now: float) -> None:
        self._shown, self._shown_at = metrics, now
        self._print("   ".join(self._progress.line_parts()))

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class Panel(Display):
    """A panel that is redrawn in place, and stays when the run ends. Notes go above it."""

    def __init__(self, total_steps: int, console: "Console", title: str, *, done: int = 0) -> None:
        from rich.live import Live

        self._progress = ProgressText(total_steps, done)
        self._console, self._title = console, title
        self._live = Live(console=console, refresh_per_second=REFRESH, get_renderable=self.render)

    def __enter__(self) -> "Panel":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self, metrics: StepMetrics) -> None:
        self._progress.add(metrics)

    def note(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(printable(text)))

    def phase(self, text: str) -> None:
        self._progress.phase = text

    def render(self) -> "RenderableType":
        from rich import box
        from rich.console import Group
        from rich.panel import Panel as Frame
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(1, progress.total), completed=progress.step)
        head.add_row(f"step {progress.step:,} of {progress.total:,}", bar, progress.left())
        body = Table.grid(padding=(0, 2), expand=True)
        body.add_column(style="dim", no_wrap=True, min_width=10)
        body.add_column(style="bold", no_wrap=True, min_width=8)
        body.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for row in progress.rows():
            body.add_row(*row)
        title = Text(printable(self._title)) if self._title else None
        return Frame(Group(head, body), title=title, title_align="left", box=box.ROUNDED)


class ProgressText:
    """The metrics so far, as text."""

    def __init__(self, total_steps: int, done: int = 0) -> None:
        self.total = total_steps
        self.done = done
        self.last: StepMetrics | None = None
        self.phase = "starting"
        self.losses: list[float] = []
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._tokens: deque[int] = deque(maxlen=RECENT)
        self._skipped = 0

    @property
    def step(self) -> int:
        return self.last.step if self.last else self.done

    def add(self, metrics: StepMetrics) -> None:
        self.last = metrics
        self._seconds.append(metrics.elapsed_s)
        self._tokens.append(metrics.tokens)
        self._skipped += metrics.skipped
        if metrics.loss is not None:
            self.losses.append(metrics.loss)

    def left(self) -> str:
        """The time left, from the mean of the last steps."""
        if self.last is None:
            return self.phase
        if self.step >= self.total:
            return "done"
        mean = sum(self._seconds) / len(self._seconds)
        return f"{_duration(mean * (self.total - self.step))} left"

    def line_parts(self) -> list[str]:
        """The last step on one line."""
        last = self.last
        assert last is not None
        parts = [f"step {last.step:,} of {self.total:,}", f"loss {_number(last.loss, '.4f')}"]
        parts.append(f"{last.tokens_per_s:,.0f} tokens/s")
        parts += _named(
            ("efficiency", last.efficiency, ".0%"),
            ("mfu", last.mfu, ".0%"),
            ("grad norm", last.grad_norm, ".2f"),
            ("lr", last.lr, ".1e"),
        )
        parts += _own(last)
        if last.skipped:
            parts.append("update skipped")
        return [*parts, self.left()] if self.step < self.total else parts

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of the panel: a name, a number, and details."""
        last = self.last
        if last is None:
            return [(name, "–", "") for name in ("loss", "tokens/s", "efficiency", "lr")]
        seconds = sum(self._seconds)
        speed = sum(self._tokens) / seconds if seconds else None
        costs = _measured(
            (last.tflops, ".3g", "TFLOP/s"),
            (last.mfu, ".0%", "of peak"),
            (last.memory_gib, ".1f", "GiB"),
            (last.data_wait_s, ".2f", "s waiting for data"),
        )
        plan = [
            f"{last.rounds} round{'s' if last.rounds != 1 else ''}",
            f"{last.sequences:,} sequences",
            f"{last.tokens:,} tokens",
            *_measured((last.padding, ".0%", "padding"), (last.plan_s, ".2f", "s to plan")),
        ]
        update = [f"gradient norm {_number(last.grad_norm, '.2f')}"]
        update += [f"{self._skipped:,} skipped"] if self._skipped else []
        own = [("", "", " · ".join(_own(last)))] if last.loss_metrics else []
        return [
            ("loss", _number(last.loss, ".4f"), sparkline(self.losses)),
            *own,
            ("tokens/s", _number(speed, ",.0f"), " · ".join(costs)),
            ("efficiency", _number(last.efficiency, ".0%"), " · ".join(plan)),
            ("lr", f"{last.lr:.1e}", " · ".join(update)),
        ]


def sparkline(values: list[float], width: int = WIDTH) -> str:
    """Values as bars, each the mean of one of `width` even parts; a non-finite mean is a gap.

    [3, 2, 1] is █▅▁.
    """
    count = min(width, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(cuts)]
    finite = [mean for mean in means if mean - mean == 0]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] if mean - mean == 0 else " " for mean in means)


def _named(*entries: tuple[str, float | None, str]) -> list[str]:
    """The known values, each after its name."""
    return [f"{name} {value:{form}}" for name, value, form in entries if value is not None]


def _own(metrics: StepMetrics) -> list[str]:
    """What the loss function returned beside its values."""
    names = metrics.loss_metrics or {}
    return _named(*((name.replace("_", " "), value, ".3g") for name, value in names.items()))


def _measured(*entries: tuple[float | None, str, str]) -> list[str]:
    """The known values, each before its unit."""
    return [f"{value:{form}} {unit}" for value, form, unit in entries if value is not None]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _duration(seconds: float) -> str:
    """75 seconds are 1:15, 3,700 are 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
