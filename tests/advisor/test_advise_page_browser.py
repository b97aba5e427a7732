"""Opens the page of `longshore advise` in headless Chromium and looks at what it drew."""

import html
import re
import subprocess

import pytest
from tests.report.test_plan_page_browser import CHROMIUM, FLAGS

from longshore.advisor.advise_page import MEMORY_NAMES, write_advise_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH"),
]


def candidate(**changed):
    memory = dict.fromkeys(MEMORY_NAMES, 0.0) | {"parameters": 10.0, "activations": 30.0}
    values = {
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "ep": 1,
        "lanes": 8,
        "shard": "none",
        "sync": "step",
        "recompute": False,
        "capacity": 16384,
        "max_cp": 8,
        "graphs": 0,
        "rounds": 3,
        "memory": memory,
        "memory_gib": 40.0,
        "at_capacity_gib": 50.0,
        "moment": "loss",
        "seconds": 1.5,
        "tokens_per_s": 1000.0,
        "mfu": 0.5,
        "of_product": 0.625,
        "days": 2.0,
        "tensors_gib": 39.0,
    }
    return values | changed


DATA = {
    "model": "<b>tiny</b>",
    "layers": 2,
    "gpus": 8,
    "gpu": "h200",
    "machine": "NVIDIA H200",
    "basis": "NVIDIA H100: derived from data sheets, not measured",
    "notes": ["a <i>note</i>"],
    "memory_gib": 100.0,
    "room_gib": 90.0,
    "dtype": "bfloat16",
    "sequences": 12,
    "longest": 900,
    "batch": 4,
    "step_tokens": 2000,
    "total_tokens": 10**9,
    "compared": 7,
    "recipe": "[plan]\ncapacity = 16384\n",
    "reasons": [["plan.capacity", "16384", "it fits"]],
    "candidates": [candidate(), candidate(tp=2, shard="zero3", tokens_per_s=500.0, mfu=None)],
}


def test_bars_reasons_and_recipe(tmp_path):
    page = tmp_path / "advice.html"
    write_advise_page(page, DATA)
    done = subprocess.run(
        [CHROMIUM, *FLAGS, page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    drawn = done.stdout.split('<script type="application/json"')[0]
    assert "Uncaught" not in done.stderr
    assert drawn.count('class="bar"') == 2
    assert "<b>tiny</b>" not in drawn, "a model's name is text"
    assert "tp 2, zero3, capacity 16,384" in html.unescape(drawn)
    widths = [float(each) for each in re.findall(r'bar speed"><b style="width: ([\d.]+)%', drawn)]
    assert widths == [100, 50]
    assert "it fits" in drawn
    assert "derived from data sheets, not measured" in drawn
    assert "a &lt;i&gt;note&lt;/i&gt;" in drawn
    assert "<td>50%</td><td>63%</td>" in drawn
    assert "<td>–</td><td>63%</td>" in drawn
    assert "capacity = 16384" in drawn
