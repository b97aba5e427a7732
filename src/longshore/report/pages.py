"""Writes plans as one HTML file that works offline.

In: the plans of one or more steps, and for comparison other policies' plans of the same steps, or
the reason why a policy was refused. Out: a file with its style, script and data inside. For example

    write_plan_page("plan.html", [plan], {"static": [static_plan], "padded": "3 is too long"})

The pieces lie beside this file; `plan_page.html` names the places of the others, as `{{css}}`.
"""

import json
import re
from collections.abc import Sequence as Seq
from importlib.resources import files
from pathlib import Path

from longshore.files import write_atomically
from longshore.plan.types import Plan
from longshore.report.page_data import Comparisons, Json, page_data

SCRIPTS = (
    "plan_page_text.js",
    "plan_page_view.js",
    "plan_page_gestures.js",
    "plan_page_blocks.js",
    "plan_page_lanes.js",
    "plan_page_pipeline.js",
    "plan_page_charts.js",
    "plan_page.js",
)


def write_plan_page(path: str | Path, steps: Seq[Plan], comparisons: Comparisons) -> None:
    """Writes the page; with a pipeline (pp > 1) it also shows the simulated ranks."""
    write_atomically(path, plan_page(page_data(steps, comparisons)))


def plan_page(data: Json) -> str:
    """The page's text around its data."""
    parts = {
        "css": _piece("plan_page.css"),
        "js": "\n".join(_piece(name) for name in SCRIPTS),
        "data": script_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _piece("plan_page.html"))


def script_json(data: Json) -> str:
    """JSON that cannot end the script element it stands in: "<" becomes "\\u003c"."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _piece(name: str) -> str:
    return files("longshore.report").joinpath(name).read_text(encoding="utf-8")
