"""The metrics of a step, and what a run shows of them: a live panel, lines, or nothing.

In: StepMetrics, one after the other, and notes. Out: text on a stream.

    with make_display("auto", 60, stream=sys.stdout) as display:
        display.update(metrics)
        display.note("wrote runs/demo-1")

As lines, the first and the last step always, and others when ten seconds have passed:

    step 1 of 60   loss 5.5407   8,312 tokens/s   efficiency 91%   grad norm 2.31   lr 8.3e-04

In metrics.jsonl a step is one JSON object, where a number that is not finite or unknown is null:

    {"step": 1, "epoch": 0, "loss": 5.5407, …, "mfu": null, …, "skipped": false}
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from longshore.files import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

OPTIONAL = ("balance_loss", "index_loss", "mtp_losses", "loss_metrics", "graphed", "graph_gib")
"""Left out without experts, without mixers that have a loss of their own, without multi-token
prediction, with a loss that has no metrics, and without CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, over all ranks."""

    step: int
    """From 1."""
    epoch: float
    """From 0."""
    loss: float | None
    """The main loss, divided by its count; None for a skipped step."""
    loss_tokens: int
    """Labels that count in the main loss."""
    tokens: int
    """Real tokens, without padding."""
    sequences: int
    """Real sequences."""
    grad_norm: float | None
    """The global gradient norm before clipping."""
    lr: float
    """The learning rate of the update."""
    elapsed_s: float
    """Seconds of the step, waiting for data included."""
    tokens_per_s: float
    """Real tokens per second over all ranks."""
    tflops: float | None
    """TFLOP/s of one rank: products that a step has, without those that are recomputed."""
    mfu: float | None
    """Model FLOPs utilization: their fraction of the vendor's dense peak; None if it is unknown."""
    rounds: int
    """Rounds of the plan."""
    efficiency: float | None
    """The fraction of the lanes' time that the plan spends on real work, as estimated."""
    padding: float | None
    """The fraction of the plan's tokens that are padding."""
    plan_s: float | None
    """Seconds of planning."""
    data_wait_s: float | None
    """Seconds of waiting for data."""
    memory_gib: float | None
    """Peak memory of this rank."""
    skipped: bool
    """Whether the step had no loss token, so that nothing was updated."""
    balance_loss: float | None = None
    """The experts' balance loss."""
    index_loss: float | None = None
    """The mixers' own losses together: those of sparse attention's indexers."""
    mtp_losses: tuple[float, ...] | None = None
    """The loss of each depth of multi-token prediction."""
    loss_metrics: Mapping[str, float | None] | None = None
    """What the loss function returned beside its values, such as DPO's reward_margin."""
    graphed: Mapping[str, int] | None = None
    """Forward passes of layers on all lanes by what CUDA graphs replayed: whole, halves, eager."""
    graph_gib: float | None = None
    """Memory of this rank's graphs."""

    def as_dict(self) -> dict[str, Any]:
        """Every figure by its name; those that this model does not have are left out."""
        return {
            name: value for name, value in asdict(self).items() if name not in OPTIONAL or value
        }

    def to_json(self) -> str:
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.as_dict().items()
        }
        return json.dumps(values, allow_nan=False)


def graphed_text(graphed: Mapping[str, int], graph_gib: float | None) -> str:
    """How graphs served the layers of some steps, in one line."""
    count = sum(graphed.values())
    names = {"whole": "as a whole", "halves": "by halves", "eager": "eagerly"}
    shares = [f"{graphed[way] / count:.0%} {name}" for way, name in names.items() if graphed[way]]
    memory = "" if graph_gib is None else f"; graphs take {graph_gib:.2f} GiB"
    return f"CUDA graphs: {count:,} layers ran {', '.join(shares)}{memory}"


EVERY_S = 10.0
REFRESH = 4  # times a second
RECENT = 20
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40


class Display(AbstractContextManager["Display"]):
    """Where a run reports to, with the metrics so far as text; this one shows nothing.

    done: the steps done before the run was resumed. At its end the terminal is restored.
    """

    def __init__(self, total_steps: int = 0, *, done: int = 0) -> None:
        self.total, self.done = total_steps, done
        self.last: StepMetrics | None = None
        self.losses: list[float] = []
        self._phase = "starting"
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._tokens: deque[int] = deque(maxlen=RECENT)
        self._skipped = 0

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        """Shows a line."""

    def phase(self, text: str) -> None:
        """What happens now, before the first step's figures."""
        self.note(text)

    def note_on_step(self, text: str) -> None:
        """A note on the last step, after that step's own figures."""
        self.note(text)

    def update(self, metrics: StepMetrics) -> None:
        self.last = metrics
        self._seconds.append(metrics.elapsed_s)
        self._tokens.append(metrics.tokens)
        self._skipped += metrics.skipped
        if metrics.loss is not None:
            self.losses.append(metrics.loss)

    @property
    def step(self) -> int:
        return self.last.step if self.last else self.done

    def left(self) -> str:
        """The time left, from the mean of the last steps."""
        if self.last is None:
            return self._phase
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


class Lines(Display):
    """A line every EVERY_S seconds."""

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(total_steps)
        self._stream, self._clock = stream, clock
        self._shown_at: float | None = None
        self._shown: StepMetrics | None = None

    def update(self, metrics: StepMetrics) -> None:
        super().update(metrics)
        is_due = self._shown_at is None or self._clock() - self._shown_at >= EVERY_S
        if is_due or metrics.step == self.total or metrics.skipped:
            self._show_last()

    def note(self, text: str) -> None:
        self._print(printable(text))

    def note_on_step(self, text: str) -> None:
        self._show_last()
        self.note(text)

    def __exit__(self, *_: object) -> None:
        self._show_last()

    def _show_last(self) -> None:
        if self.last is not None and self.last is not self._shown:
            self._shown, self._shown_at = self.last, self._clock()
            self._print("   ".join(self.line_parts()))

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class Panel(Display):
    """A panel that is redrawn in place, and stays when the run ends. Notes go above it."""

    def __init__(self, total_steps: int, console: "Console", title: str, *, done: int = 0) -> None:
        from rich.live import Live

        super().__init__(total_steps, done=done)
        self._console, self._title = console, title
        self._live = Live(console=console, refresh_per_second=REFRESH, get_renderable=self.render)

    def __enter__(self) -> "Panel":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(printable(text)))

    def phase(self, text: str) -> None:
        self._phase = text

    def render(self) -> "RenderableType":
        from rich import box
        from rich.console import Group
        from rich.panel import Panel as Frame
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(1, self.total), completed=self.step)
        head.add_row(f"step {self.step:,} of {self.total:,}", bar, self.left())
        body = Table.grid(padding=(0, 2), expand=True)
        body.add_column(style="dim", no_wrap=True, min_width=10)
        body.add_column(style="bold", no_wrap=True, min_width=8)
        body.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for row in self.rows():
            body.add_row(*row)
        title = Text(printable(self._title)) if self._title else None
        return Frame(Group(head, body), title=title, title_align="left", box=box.ROUNDED)


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
        return Display()
    if kind == "plain":
        return Lines(total_steps, stream, clock)
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return Lines(total_steps, stream, clock)
    return Panel(total_steps, console, title, done=done)


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
