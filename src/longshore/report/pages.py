"""Writes plans, or runs, as one HTML file that works offline.

In: the plans of one or more steps, with other policies' plans of the same steps for comparison or
the reason why a policy was refused; or the folders of runs. Out: a file that contains its styles,
scripts and data. For example

    write_plan_page("plan.html", [plan], {"static": [static_plan], "padded": "3 is too long"})
    write_run_page("compare.html", read_runs(["runs/demo-1", "runs/demo-2"]))

The pieces are next to this file; `plan_page.html` and `run_page.html` have placeholders such as
`{{css}}` for the others.
"""

import json
import re
from collections.abc import Sequence as Seq
from importlib.resources import files
from pathlib import Path

from longshore.files import write_atomically
from longshore.plan.types import Plan
from longshore.report.page_data import Comparisons, Json, page_data
from longshore.report.run_data import run_page_data
from longshore.report.run_files import read_run

PLAN_STYLES = ("plan_page.css",)
PLAN_SCRIPTS = (
    "plan_page_text.js",
    "plan_page_view.js",
    "plan_page_gestures.js",
    "plan_page_blocks.js",
    "plan_page_lanes.js",
    "plan_page_pipeline.js",
    "plan_page_charts.js",
    "plan_page.js",
)
RUN_STYLES = ("plan_page.css", "run_page.css")
RUN_SCRIPTS = (
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
    "run_page_refine.js",
    "run_page_pipeline.js",
    "run_page_experts.js",
    "run_page_graphs.js",
    "run_page_step.js",
    "run_page.js",
)


def write_plan_page(path: str | Path, steps: Seq[Plan], comparisons: Comparisons) -> None:
    """Writes the page; with a pipeline (pp > 1) it also shows the simulated ranks."""
    write_atomically(path, plan_page(page_data(steps, comparisons)))


def plan_page(data: Json) -> str:
    """The HTML of a plan page with its data."""
    return page_of("plan_page.html", data, styles=PLAN_STYLES, scripts=PLAN_SCRIPTS)


def read_runs(folders: Seq[str | Path]) -> Json:
    """The data of the page of these runs."""
    return run_page_data([read_run(folder) for folder in folders])


def write_run_page(path: str | Path, data: Json) -> None:
    write_atomically(path, run_page(data))


def run_page(data: Json) -> str:
    """The HTML of a run page with its data."""
    return page_of("run_page.html", data, styles=RUN_STYLES, scripts=RUN_SCRIPTS)


def page_of(template: str, data: Json, *, styles: Seq[str], scripts: Seq[str]) -> str:
    parts = {
        "css": "\n".join(map(_piece, styles)),
        "js": "\n".join(map(_piece, scripts)),
        "data": script_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _piece(template))


def script_json(data: Json) -> str:
    """JSON that cannot end the script element around it: "<" becomes "\\u003c"."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _piece(name: str) -> str:
    return files("longshore.report").joinpath(name).read_text(encoding="utf-8")
