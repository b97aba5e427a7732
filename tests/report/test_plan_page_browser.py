"""Opens the page in headless Chromium and looks at what it drew."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from longshore.report.pages import write_plan_page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=2000",
    "--dump-dom",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no chromium or google-chrome on PATH (Debian: apt-get install chromium)",
    ),
]

# Runs after the page's own script, uses the page as a reader would, and leaves what it saw in
# data-probe: how many pixels of the picture have each colour of the legend, and texts.
PROBE = """
<script>
function pixels(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const counts = {};
  for (let i = 0; i < data.length; i += 4) {
    const colour = `rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`;
    counts[colour] = (counts[colour] || 0) + 1;
  }
  return counts;
}
function look(id) {
  const counts = pixels(document.querySelector(`#${id} canvas.main`));
  const legend = [...document.querySelectorAll(`#${id} .swatch[style]`)];
  return legend.map((swatch) => counts[getComputedStyle(swatch).backgroundColor] || 0);
}
window.requestAnimationFrame = (draw) => draw();  // frames are rare without a screen
const text = (selector) => document.querySelector(selector).textContent;
function probe() {
  const saw = { lanes: look("timeline"), title: text("h1"), summary: text("#summary") };
  saw.digest = text("#digest");
  const canvas = document.querySelector("#timeline canvas.main");
  canvas.focus();
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  saw.tip = document.querySelector("#timeline .tip").hidden ? "" : text("#timeline .tip");
  const before = canvas.toDataURL();
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -60, ctrlKey: true, cancelable: true }));
  saw.zoomed = canvas.toDataURL() !== before;
  if (!document.querySelector("#pipeline-section").hidden) saw.pipeline = look("pipeline");
  if (!document.querySelector("#steps").hidden) document.querySelector("#next").click();
  saw.nextSummary = text("#summary");
  saw.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.documentElement.dataset.probe = JSON.stringify(saw);
}
probe();
</script>
</body>
"""


class Seen:
    """A page after its scripts ran: its DOM as text, what the probe saw, and every complaint."""

    def __init__(self, dom, log):
        self.dom = dom
        self.ready = 'data-ready="yes"' in dom
        console = [line for line in log.splitlines() if ":CONSOLE" in line]
        self.complaints = console + re.findall(r'data-errors="([^"]*)"', dom)
        probe = re.search(r'data-probe="([^"]*)"', dom)
        self.probe = json.loads(html.unescape(probe[1])) if probe else {}

    def figure(self, name):
        match = re.search(rf'data-figure="{name}".*?<dd class="value[^"]*">(.*?)</dd>', self.dom)
        return html.unescape(match[1]).replace("\u00a0", " ")


def open_page(path, tmp_path, *, width=1400):
    page = path.read_text(encoding="utf-8")
    path.write_text(page.replace("</body>\n", PROBE), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--window-size={width},900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Seen(done.stdout, done.stderr)


def test_shows_figures_and_draws(make, tmp_path):
    rounds = [[(0, 2, (0,)), (1, 1, (1,))], [(0, 1, (2,)), (1, 1, (3,))]]
    plan = make([8, 3, 3, 3], rounds, lanes=2)
    static = replace(plan, stats=replace(plan.stats, predicted=20.0))
    path = tmp_path / "plan.html"
    write_plan_page(path, [plan], {"static": [static], "padded": "a reason with <b>& marks"})
    seen = open_page(path, tmp_path)
    assert seen.complaints == []
    assert seen.ready
    assert seen.probe["title"] == "Plan for 2 lanes"
    assert min(seen.probe["lanes"]) > 1000, "every colour of the legend covers part of the picture"
    assert seen.figure("predicted") == "10 s"
    assert seen.figure("gap") == "17.6 %"
    assert seen.figure("imbalance") == "15 %"
    assert seen.figure("tokens") == "17"
    assert 'data-figure="digest"' not in seen.dom, "a hash is no key figure"
    assert seen.probe["digest"].endswith(plan.digest)
    assert "a reason with &lt;b&gt;&amp; marks" in seen.dom
    assert "2 ×" in seen.dom
    assert "CP size" in seen.probe["tip"], "an arrow key shows a pack's details"
    assert seen.probe["zoomed"]


def test_a_big_plan_of_several_steps(make_random, tmp_path):
    steps = [make_random(1024, rounds=3, seed=seed) for seed in (1, 2)]
    path = tmp_path / "plan.html"
    write_plan_page(path, steps, {})
    seen = open_page(path, tmp_path, width=500)
    assert seen.complaints == []
    assert seen.ready
    assert max(seen.probe["lanes"]) > 1000
    assert seen.probe["zoomed"]
    assert seen.probe["nextSummary"] != seen.probe["summary"]
    assert seen.probe["overflow"] <= 0, "nothing sticks out of a narrow page"


def test_sync_step_with_a_pipeline(make_random, tmp_path):
    plan = make_random(8, rounds=4, seed=3, sync="step")
    plan = replace(plan, setting=replace(plan.setting, pp=2))
    path = tmp_path / "plan.html"
    write_plan_page(path, [plan], {})
    seen = open_page(path, tmp_path)
    assert seen.complaints == []
    assert seen.ready
    assert min(seen.probe["pipeline"]) > 1000


@pytest.mark.parametrize(
    ("place", "harm"),
    [
        ("showFigures() {", "throw new Error('broken on purpose');"),
        ("paintPacks(ctx, frame, theme) {", "frame.missing();"),
        ("class Page {", "}"),
    ],
)
def test_notices_a_script_that_fails(make, tmp_path, place, harm):
    path = tmp_path / "plan.html"
    write_plan_page(path, [make([8], [[(0, 1, (0,))]], lanes=1)], {})
    page = path.read_text(encoding="utf-8")
    assert page.count(place) == 1
    path.write_text(page.replace(place, place + harm), encoding="utf-8")
    seen = open_page(path, tmp_path)
    assert not seen.ready
    assert seen.complaints
