"""bench/scale.py runs, and its drawing can be read."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.scale_plots import Line, Panel, drawing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_quick_run_prints_all_tables_and_no_plan_is_wrong():
    before = (ROOT / "bench" / "RESULTS.md").read_bytes()
    command = [sys.executable, str(ROOT / "bench" / "scale.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for title in ("Targets", "Over the bound, and speed: pp 4, experts", "Plans"):
        assert f"### {title}" in lines
    valid = next(line for line in lines if "every plan is valid" in line)
    assert valid == "| every plan is valid and takes the time it says | 32 | 0 are not | – | pass |"
    assert (ROOT / "bench" / "RESULTS.md").read_bytes() == before


def test_a_drawing_has_every_line_inside_its_panel():
    lines = (Line("fast", ((64, 1.0), (128, 1.5))), Line("slow", ((64, 2.0), (128, 7.0))))
    panels = [Panel("One", "times", lines), Panel("Two", "seconds", lines[:1], log=True)]
    root = ElementTree.fromstring(drawing(panels, "Two panels"))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    drawn = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(drawn) == 3
    for line in drawn:
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert len(points) == 2
        assert all(0 < x < width / 2 and 0 < y < height for x, y in points)
    names = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert names.count("fast") == 2
    assert names.count("slow") == 1
