"""What `longshore advise` prints, and its page: candidates, memory, speed, reasons and the recipe.

In: the data of advisor/advise.py. Out: lines of text, and one HTML file that works offline, in
which a candidate is a bar of its memory, part by part, against a line at the memory that may be
used, and a bar of its tokens/s.

    qwen3-8b on 8 × h200 (139.8 GiB each): 81,753 tokens/s, 58% MFU, 2.1 days
       tp  pp  ep  shard  recompute  capacity  max CP  memory  step   tokens/s  MFU  days
    →   1   1   1  zero3         no    16,384       8    88.5  5.37     81,753  58%   2.1
"""

from collections.abc import Sequence as Seq
from pathlib import Path

from longshore.files import write_atomically
from longshore.report.pages import page_of
from longshore.report.plan_page import Json

MEMORY_NAMES = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "working": "backward",
    "exchanged": "gathered K/V",
    "loss": "loss",
    "graphs": "graphs",
    "communicators": "communicators",
    "context": "CUDA",
    "other": "workspace",
}
"""What each part of the memory is called, in the order it is shown."""


def advise_summary(data: Json) -> list[str]:
    best = data["candidates"][0]
    return [
        headline(data),
        f"{data['sequences']:,} sequences, the longest {data['longest']:,} tokens; "
        f"{data['batch']:,} of them, about {data['step_tokens']:,} tokens, are a step; "
        f"{data['compared']:,} ways compared",
        *(line for line in (data["basis"], *data["notes"]) if line),
        *table(_candidate_rows(data["candidates"])),
        "memory in GiB of the GPU that needs most, step in seconds; → recommended; MFU: share of "
        "the vendor's dense peak, recomputation not counted",
        "",
        *table(_memory_rows(data["candidates"])),
        f"GiB, at the peak ({best['moment']}); with full lanes {best['at_capacity_gib']:.1f} of "
        f"{data['room_gib']:.1f} that may be used; communicators and CUDA are assumptions",
        "",
        *(f"{key} = {value}: {text}" for key, value, text in data["reasons"]),
        "",
        *data["recipe"].splitlines(),
    ]


def headline(data: Json) -> str:
    best = data["candidates"][0]
    return (
        f"{data['model']} on {data['gpus']} × {data['gpu']} ({data['memory_gib']:.1f} GiB each): "
        f"{best['tokens_per_s']:,.0f} tokens/s, {utilization(best)}, {days(best['days'])} for "
        f"{data['total_tokens']:,} tokens"
    )


def utilization(candidate: Json) -> str:
    """Its FLOP/s as a share of the vendor's peak, where that is known, and of a real product's."""
    product = f"{candidate['of_product']:.0%} of the fastest product"
    mfu = candidate["mfu"]
    return product if mfu is None else f"{mfu:.0%} MFU ({product})"


def days(number: float) -> str:
    if number >= 1:
        return f"{number:,.1f} days"
    return f"{number * 24:.1f} hours" if number >= 1 / 24 else f"{number * 1440:.1f} minutes"


def _candidate_rows(candidates: Seq[Json]) -> list[list[str]]:
    header = ["", "tp", "pp", "ep", "shard", "sync", "recompute", "graphs", "capacity", "max CP"]
    rows = [[*header, "memory", "step", "tokens/s", "MFU", "time"]]
    for place, each in enumerate(candidates):
        rows.append(
            [
                "" if place else "→",
                str(each["tp"]),
                f"{each['pp']}×{each['vpp']}" if each["vpp"] > 1 else str(each["pp"]),
                str(each["ep"]),
                each["shard"],
                each["sync"],
                "blocks" if each["recompute"] else "none",
                "all" if each["graphs"] else "none",
                f"{each['capacity']:,}",
                str(each["max_cp"]),
                f"{each['memory_gib']:.1f}",
                f"{each['seconds']:.3g}",
                f"{each['tokens_per_s']:,.0f}",
                "–" if each["mfu"] is None else f"{each['mfu']:.0%}",
                days(each["days"]),
            ]
        )
    return rows


def _memory_rows(candidates: Seq[Json]) -> list[list[str]]:
    used = [name for name in MEMORY_NAMES if any(each["memory"][name] for each in candidates)]
    rows = [["", *(MEMORY_NAMES[name] for name in used), "all"]]
    for place, each in enumerate(candidates):
        cells = [f"{each['memory'][name]:.1f}" for name in used]
        rows.append(["" if place else "→", *cells, f"{each['memory_gib']:.1f}"])
    return rows


def table(rows: Seq[Seq[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]


STYLES = ("plan_page.css", "advise_page.css")
SCRIPTS = ("advise_page.js",)


def write_advise_page(path: str | Path, data: Json) -> None:
    write_atomically(path, advise_page(data))


def advise_page(data: Json) -> str:
    """The HTML of the page with its data."""
    shown = {**data, "headline": headline(data), "memory_names": MEMORY_NAMES}
    return page_of("advise_page.html", shown, styles=STYLES, scripts=SCRIPTS)
