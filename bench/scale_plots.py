"""Line plots as one SVG, drawn by hand: panels side by side, lanes on a logarithmic axis.

In: panels of named lines. Out: SVG text that follows the reader's light or dark theme.

`Panel("Planning", "seconds", (Line("mixed", ((64, 0.1), (128, 0.2))),), log=True)` has one line of
two points. Lines of one name have one colour in all panels, and each is named at its last point.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 410, 300, 58, 84, 54, 46
LABEL = 15  # pixels between the names of two lines
COLOURS = ("#0b5cad", "#a8480f", "#2e7d4f", "#7a3ea3")
BRIGHT = ("#6cb2ff", "#f0a06a", "#6fcf97", "#c79bea")
STYLE = """\
.card { fill: #ffffff; stroke: #d0d7de }
text { font: 12px system-ui, sans-serif; fill: #57606a }
.title { font-size: 14px; font-weight: 600; fill: #1f2328 }
.grid { stroke: #e4e8ec } .marked { stroke: #57606a; stroke-dasharray: 4 3 }
.end { text-anchor: end } .middle { text-anchor: middle }
polyline { fill: none; stroke-width: 2 }
"""
DARK = """\
@media (prefers-color-scheme: dark) {{
  .card {{ fill: #0d1117; stroke: #3d444d }} text {{ fill: #9da7b3 }}
  .title {{ fill: #e6edf3 }} .grid {{ stroke: #2b323b }} .marked {{ stroke: #9da7b3 }}
{rules}
}}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Points (lanes, value) of one name."""

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot."""

    title: str
    """Above it."""
    unit: str
    """What the values are."""
    lines: tuple[Line, ...]
    """Each in its own colour."""
    log: bool = False
    """Values on a logarithmic axis; otherwise from 0."""
    marked: float | None = None
    """A value marked by a dashed line."""


def drawing(panels: list[Panel], about: str) -> str:
    """Two panels in a row."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    width, height = 2 * WIDTH, -(-len(panels) // 2) * HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{about}">'
    )
    parts = [head, f"<style>\n{_style(names)}</style>"]
    parts.append(f'<rect class="card" width="{width}" height="{height}" rx="8"/>')
    for number, panel in enumerate(panels):
        at = f"translate({number % 2 * WIDTH} {number // 2 * HEIGHT})"
        parts += [f'<g transform="{at}">', *_panel(panel, names), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _style(names: list[str]) -> str:
    rules = [_rule(number, colour) for number, colour in enumerate(COLOURS[: len(names)])]
    bright = [f"  {_rule(number, colour)}" for number, colour in enumerate(BRIGHT[: len(names)])]
    return STYLE + "\n".join(rules) + "\n" + DARK.format(rules="\n".join(bright))


def _rule(number: int, colour: str) -> str:
    return f".line{number} {{ stroke: {colour} }} .name{number} {{ fill: {colour} }}"


def _panel(panel: Panel, names: list[str]) -> Iterator[str]:
    values = [value for line in panel.lines for _, value in line.points]
    lanes = sorted({lane for line in panel.lines for lane, _ in line.points})
    ticks = _ticks(min(values), max([*values, panel.marked or 0.0]), log=panel.log)
    yield f'<text class="title" x="16" y="24">{panel.title}</text>'
    yield f'<text x="16" y="42">{panel.unit}</text>'
    for tick in ticks:
        y = _y(tick, ticks, log=panel.log)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{tick:g}</text>'
    for lane in lanes[:: 1 if len(lanes) < 6 else 2]:
        x = _x(lane, lanes)
        yield f'<text class="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{lane:,}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="middle" x="{middle}" y="{HEIGHT - BOTTOM + 36}">lanes</text>'
    if panel.marked is not None:
        y = _y(panel.marked, ticks, log=panel.log)
        yield f'<line class="marked" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield from _lines(panel, names, lanes, ticks)


def _lines(panel: Panel, names: list[str], lanes: list[int], ticks: list[float]) -> Iterator[str]:
    ends = []
    for line in panel.lines:
        number = names.index(line.name)
        at = [(_x(lane, lanes), _y(value, ticks, log=panel.log)) for lane, value in line.points]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        yield f'<polyline class="line{number}" points="{points}"/>'
        ends.append((at[-1][1], number))
    lowest = float("-inf")
    for y, number in sorted(ends):
        lowest = max(y, lowest + LABEL)
        x = WIDTH - RIGHT + 6
        yield f'<text class="name{number}" x="{x}" y="{lowest + 4:.1f}">{names[number]}</text>'


def _x(lane: int, lanes: list[int]) -> float:
    share = math.log(lane / lanes[0]) / max(1e-9, math.log(lanes[-1] / lanes[0]))
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(value: float, ticks: list[float], *, log: bool) -> float:
    low, high = ticks[0], ticks[-1]
    share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Round numbers around the values: powers of ten, or from 0 in at most six steps."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]
    steps = (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    step = next((step for step in steps if high / step <= 6), high)
    return [step * number for number in range(math.ceil(high / step) + 1)]
