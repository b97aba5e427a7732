"""Writes one or more runs as one HTML file that works offline.

In: the folders of runs. Out: a file with its style, scripts and data inside; and the run in words.

    data = read_runs(["runs/demo-1", "runs/demo-2"])
    write_run_page("compare.html", data)

The drawing of a step, the style and the way of embedding data are those of the plan page.
"""

import re
from collections.abc import Sequence as Seq
from importlib.resources import files
from pathlib import Path

from longshore.files import write_atomically
from longshore.report.page_data import Json
from longshore.report.plan_page import script_json
from longshore.report.run_data import run_page_data
from longshore.report.run_files import read_run

STYLES = ("plan_page.css", "run_page.css")
SCRIPTS = (
    "plan_page_text.js",
    "plan_page_view.js",
    "plan_page_gestures.js",
    "plan_page_blocks.js",
    "plan_page_lanes.js",
    "plan_page_charts.js",
    "run_page_text.js",
    "run_page_curves.js",
    "run_page_plots.js",
    "run_page_cost.js",
    "run_page_experts.js",
    "run_page_step.js",
    "run_page.js",
)


def read_runs(folders: Seq[str | Path]) -> Json:
    """What the page shows of these runs."""
    return run_page_data([read_run(folder) for folder in folders])


def write_run_page(path: str | Path, data: Json) -> None:
    write_atomically(path, run_page(data))


def run_page(data: Json) -> str:
    """The page's text around its data."""
    parts = {
        "css": "\n".join(map(_piece, STYLES)),
        "js": "\n".join(map(_piece, SCRIPTS)),
        "data": script_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _piece("run_page.html"))


def _piece(name: str) -> str:
    return files("longshore.report").joinpath(name).read_text(encoding="utf-8")
