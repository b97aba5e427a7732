"""The drawing of README.md: one step planned two ways, lanes × time, as SVG.

In: 48 sequences of the built-in sample, 8 lanes of 16,384 tokens, the built-in cost model. Out:
drawings/step.svg, all of it the planner's own output; a test fails while the file is stale:

    python docs/generate.py

A panel is a plan. A block over k lanes is a pack of CP size k, as wide as its estimated seconds;
what is grey is a lane that waits. Both panels have the same scale, so shorter is faster.
"""

from collections.abc import Iterator
from pathlib import Path

from longshore.plan import make_plan
from longshore.plan.lengths_file import demo_lengths
from longshore.plan.simulate import Timeline, make_timeline
from longshore.plan.types import Pack, Plan

DRAWING = Path(__file__).parent / "drawings" / "step.svg"
FIRST, COUNT, LANES, CAPACITY = 240, 48, 8, 16384
WIDTH, LEFT, TOP, LANE, GAP = 830, 64, 54, 20, 74
SCALE = WIDTH - LEFT - 16  # pixels of the slower plan
NARROWEST = 56  # pixels of a block that has room for words
STYLE = """\
.card { fill: #ffffff; stroke: #d0d7de }
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .small { font-size: 12px; fill: #57606a }
.in { font-size: 12px; fill: #ffffff; text-anchor: middle } .end { text-anchor: end }
.idle { fill: #e4e8ec } .cut { stroke: #57606a; stroke-dasharray: 3 3 }
.cp8 { fill: #7a3ea3 } .cp4 { fill: #0b5cad } .cp2 { fill: #a8480f } .cp1 { fill: #2e7d4f }
.block { stroke: #ffffff; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  .card { fill: #0d1117; stroke: #3d444d } text { fill: #e6edf3 } .small { fill: #9da7b3 }
  .in { fill: #ffffff } .idle { fill: #2b323b } .cut { stroke: #9da7b3 } .block { stroke: #0d1117 }
}
"""


def drawing() -> str:
    """The SVG of the two plans."""
    lengths = [int(length) for length in demo_lengths().lengths][FIRST : FIRST + COUNT]
    mixed = make_plan(lengths, lanes=LANES, capacity=CAPACITY)
    static = make_plan(lengths, lanes=LANES, capacity=CAPACITY, policy="static")
    total = max(make_timeline(plan).total for plan in (mixed, static))
    one_size = max(pack.cp_size for _, pack in static.packs())
    below = TOP + LANES * LANE + GAP
    height = below + LANES * LANE + 60
    parts = [
        *_panel(mixed, "Longshore: a CP size for each pack", TOP, total),
        *_panel(static, f"One CP size ({one_size}) for all, in order of arrival", below, total),
        *_legend(height - 22),
    ]
    return "\n".join([_head(lengths, height), *parts, "</svg>\n"])


def _head(lengths: list[int], height: int) -> str:
    words = (
        f"{len(lengths)} sequences of {min(lengths):,} to {max(lengths):,} tokens on {LANES} "
        "lanes, planned twice: with CP sizes 1, 2, 4 and 8 side by side, and with one CP size "
        "for all, which takes longer."
    )
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    inside = f'width="{WIDTH - 1}" height="{height - 1}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{words}</title>",
            f"<style>\n{STYLE}</style>",
            f'<rect x="0.5" y="0.5" {inside} rx="6" class="card"/>',
        ]
    )


def _panel(plan: Plan, title: str, top: int, total: float) -> Iterator[str]:
    timeline, scale = make_timeline(plan), SCALE / total
    bottom = top + LANES * LANE
    yield _text(LEFT, top - 28, title, "title")
    said = f"{timeline.total:.2f} s · {plan.stats.efficiency:.0%} of it work on real tokens"
    yield _text(WIDTH - 16, top - 28, said, "end")
    for lane in range(LANES):
        yield _text(14, top + lane * LANE + 15, f"lane {lane}", "small")
    idle = f'width="{timeline.total * scale:.1f}" height="{LANES * LANE}"'
    yield f'<rect x="{LEFT}" y="{top}" {idle} class="idle"/>'
    packs = zip(plan.packs(), timeline.pack_start, timeline.pack_cost, strict=True)
    for (_, pack), starts, seconds in packs:
        yield from _pack(plan, pack, starts=list(starts), seconds=seconds, top=top, scale=scale)
    yield from _rounds(timeline, top, bottom, scale)


def _pack(
    plan: Plan, pack: Pack, *, starts: list[float], seconds: float, top: int, scale: float
) -> Iterator[str]:
    """A block; lanes of a pack begin it together, or it is drawn lane by lane."""
    together = len({round(start, 9) for start in starts}) == 1
    lanes = [(pack.first_lane, pack.cp_size)]
    if not together:
        lanes = [(pack.first_lane + i, 1) for i in range(pack.cp_size)]
    for (lane, count), start in zip(lanes, starts, strict=False):
        x, y, width = LEFT + start * scale, top + lane * LANE, seconds * scale
        size = f'width="{width:.1f}" height="{count * LANE}"'
        yield f'<rect x="{x:.1f}" y="{y}" {size} class="block cp{pack.cp_size}"/>'
        if width >= NARROWEST:
            yield _text(x + width / 2, y + count * LANE / 2 + 4, _words(plan, pack, width), "in")


def _words(plan: Plan, pack: Pack, width: float) -> str:
    """As many words as have room: "4: 7,564" are 4 sequences of 7,564 tokens together."""
    tokens = sum(plan.sequences[i].length for i in pack.sequences)
    number = len(pack.sequences)
    if width < 2.3 * NARROWEST:
        return f"{number}: {tokens:,}"
    return f"{number} sequence{'s' if number > 1 else ''}: {tokens:,}"


def _rounds(timeline: Timeline, top: int, bottom: int, scale: float) -> Iterator[str]:
    ends = [LEFT + float(end.max()) * scale for end in timeline.end]
    for number, (x1, x2) in enumerate(zip([float(LEFT), *ends], ends, strict=False)):
        yield f'<line x1="{x2:.1f}" x2="{x2:.1f}" y1="{top - 18}" y2="{bottom}" class="cut"/>'
        yield _text(x1 + 4, top - 6, f"round {number}", "small")


def _legend(y: int) -> Iterator[str]:
    """What a colour means."""
    x = LEFT
    for size in (8, 4, 2, 1):
        yield f'<rect x="{x}" y="{y - 11}" width="13" height="13" class="cp{size}"/>'
        yield _text(x + 19, y, f"CP size {size}", "small")
        x += 95
    yield f'<rect x="{x}" y="{y - 11}" width="13" height="13" class="idle"/>'
    yield _text(x + 19, y, "waiting", "small")
    yield _text(WIDTH - 16, y, "sequences: tokens · time →, estimated", "small end")


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{words}</text>'
