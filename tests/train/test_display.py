import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.train.test_metrics import METRICS

from longshore.train.display import Display, Lines, Panel, make_display, sparkline


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def __call__(self):
        return self.now


def step(number, **changes):
    return replace(METRICS, step=number, **changes)


def shown(panel, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(panel.render())
    return console.file.getvalue()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("TERM", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("kind", "stream", "made"),
    [
        ("auto", Terminal(), Panel),
        ("auto", io.StringIO(), Lines),
        ("live", Terminal(), Panel),
        ("live", io.StringIO(), Lines),
        ("plain", Terminal(), Lines),
        ("none", Terminal(), Display),
    ],
)
def test_the_stream_decides(kind, stream, made):
    assert type(make_display(kind, 3, stream=stream)) is made


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_display("auto", 3, stream=Terminal())) is Lines


def test_none_shows_nothing():
    stream = io.StringIO()
    with make_display("none", 2, stream=stream) as display:
        display.update(step(1))
        display.note("wrote runs/demo-1")
    assert stream.getvalue() == ""


def test_lines_are_the_first_the_last_and_one_every_ten_seconds():
    stream, clock = io.StringIO(), Clock()
    with make_display("plain", 40, stream=stream, clock=clock) as display:
        for number in range(1, 41):
            display.update(step(number))
            clock.now += 1.0
        display.note("wrote runs/demo-1")
    *lines, note = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1", "11", "21", "31", "40"]
    assert note == "wrote runs/demo-1"
    assert lines[0] == (
        "step 1 of 40   loss 5.5000   200 tokens/s   efficiency 90%   grad norm 1.25   lr 3.0e-04"
        "   0:20 left"
    )
    assert lines[-1].endswith("lr 3.0e-04")


def test_the_last_line_comes_even_if_the_run_ends_early():
    stream = io.StringIO()
    with make_display("plain", 40, stream=stream, clock=Clock()) as display:
        for number in (1, 2, 3):
            display.update(step(number))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1", "3"]


def test_a_note_on_a_step_comes_behind_the_step_s_own_line():
    stream = io.StringIO()
    with make_display("plain", 40, stream=stream, clock=Clock()) as display:
        display.phase("planning…")
        for number in (1, 2, 3):
            display.update(step(number))
        display.note_on_step("step 3: held-out loss 5.1")
        display.note_on_step("step 3: held-out-2 loss 5.2")
    words = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert words == [
        "planning…",
        "step 1 of 40",
        "step 3 of 40",
        "step 3: held-out loss 5.1",
        "step 3: held-out-2 loss 5.2",
    ]


def test_what_happens_before_there_is_a_step():
    for kind, expected in (("auto", "reading the data…\n"), ("none", "")):
        stream = io.StringIO()
        make_display(kind, 0, stream=stream).note("reading the data…")
        assert stream.getvalue() == expected
    panel = Panel(60, Console(file=io.StringIO()), "demo", done=40)
    assert "step 40 of 60" in shown(panel), "where a resumed run stands"
    panel.phase("first step (compiling)…")
    assert "first step (compiling)…" in shown(panel)
    panel.update(step(1))
    assert "compiling" not in shown(panel)


def test_a_run_without_a_step_shows_no_line():
    stream = io.StringIO()
    with make_display("plain", 40, stream=stream):
        pass
    assert stream.getvalue() == ""


def test_a_skipped_update_has_its_line():
    stream = io.StringIO()
    with make_display("plain", 9, stream=stream, clock=Clock()) as display:
        display.update(step(1))
        display.update(step(2, loss=None, grad_norm=None, efficiency=None, skipped=True))
        display.update(step(3))
    lines = stream.getvalue().splitlines()
    assert lines[1] == (
        "step 2 of 9   loss –   200 tokens/s   lr 3.0e-04   update skipped   0:04 left"
    )
    assert len(lines) == 3


def test_the_panel_before_during_and_after():
    panel = Panel(60, Console(file=io.StringIO()), "demo [4 ranks]")
    assert "step 0 of 60" in shown(panel)
    assert "starting" in shown(panel)
    for number in range(1, 31):
        panel.update(step(number, loss=6 - number / 10, skipped=number == 4))
    text = shown(panel)
    for part in ("demo", "step 30 of 60", "0:15 left", "3.0000", "█", "▁", "90%", "2 rounds"):
        assert part in text, part
    for part in ("7 sequences", "100 tokens", "1% padding", "gradient norm 1.25", "1 skipped"):
        assert part in text, part
    assert "GiB" not in text
    assert "TFLOP/s" not in text
    panel.update(step(60, tflops=321.4, mfu=0.41, memory_gib=61.24))
    text = shown(panel)
    for part in ("step 60 of 60", "done", "321 TFLOP/s · 41% of peak · 61.2 GiB"):
        assert part in text, part


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_the_panel_fits_its_terminal(width):
    panel = Panel(1_000_000, Console(file=io.StringIO()), "a title " * 9)
    for number in range(1, 100):
        panel.update(step(number, tokens=10**9, tflops=321.4, mfu=0.41, memory_gib=61.2))
    lines = shown(panel, width).splitlines()
    assert {len(line) for line in lines} == {width}
    assert len(lines) == 7


def test_a_live_run_leaves_its_notes_and_its_last_state():
    stream = Terminal()
    with make_display("live", 2, stream=stream, title="demo") as display:
        display.update(step(1))
        display.note("[wrote] runs/demo-1")
        display.update(step(2, loss=4.25))
    text = stream.getvalue()
    assert "[wrote] runs/demo-1" in text
    assert "4.2500" in text.rpartition("step 2 of 2")[2]
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_the_cursor_comes_back_after_an_error():
    stream = Terminal()
    with pytest.raises(ZeroDivisionError), make_display("live", 2, stream=stream):
        raise ZeroDivisionError
    assert "\x1b[?25h" in stream.getvalue()


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([3.0, 2.0, 1.0], "█▅▁"),
        ([0.0, float("nan"), 7.0], "▁ █"),
        ([float("nan")], " "),
        ([float("inf"), 1.0, 2.0], " ▁█"),
    ],
)
def test_sparkline(values, bars):
    assert sparkline(values) == bars


def test_a_long_sparkline_is_means_of_even_parts():
    assert sparkline([float(i) for i in range(80)], width=8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([1.0] * 1001, width=40)) == 40


def test_time_left_is_from_the_recent_steps():
    progress = Display(1000)
    assert progress.left() == "starting"
    progress.update(step(1, elapsed_s=500.0))
    assert progress.left() == "138:45:00 left"
    for number in range(2, 22):
        progress.update(step(number, elapsed_s=0.1))
    assert progress.left() == "1:38 left"


def test_metrics_of_the_loss_are_shown():
    text = Display(9)
    text.update(step(3, loss_metrics={"reward_margin": 0.125, "reward_accuracy": None}))
    assert "reward margin 0.125" in text.line_parts()
    assert ("", "", "reward margin 0.125") in text.rows()
