"""Opens the page of a run in headless Chromium, in a frame as wide as a desktop's or a phone's."""

import json
import re
import subprocess

import pytest
from tests.report.run_folders import make_run, write_lines
from tests.report.test_plan_page_browser import CHROMIUM, FLAGS, Seen

from longshore.report.pages import read_runs, write_run_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH"),
]

# Runs after the page's own script, uses the page as a reader would, and sends what it saw to the
# page around it.
PROBE = """
<script>
window.requestAnimationFrame = (draw) => draw();  // frames are rare without a screen
const text = (selector) => document.querySelector(selector).textContent;
const all = (selector) => [...document.querySelectorAll(selector)];
const paths = (chart) => all(`#${chart} path`).map((path) => path.getAttribute("d"));
const charts = () => all("#curves > figure").map((figure) => figure.id);
function colours(selector) {
  const canvas = document.querySelector(selector);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(`rgb(${[...data.slice(i, i + 3)].join(", ")})`);
  return seen;
}
const picture = () => document.querySelector("#timeline canvas.main").toDataURL();
function press(name) {
  all("#controls button").find((button) => button.textContent === name).click();
}
function change(selector, value) {
  const node = document.querySelector(selector);
  node.value = value;
  node.dispatchEvent(new Event("change"));
}
function point(selector, name, share) {
  const box = document.querySelector(selector).getBoundingClientRect();
  const [clientX, clientY] = [box.left + box.width * share, box.top + box.height / 2];
  document.querySelector(selector).dispatchEvent(new PointerEvent(name, { clientX, clientY }));
}
function tryCurves(saw) {
  saw.charts = charts();
  saw.empty = saw.charts.filter((chart) => !paths(chart).some((d) => d.length > 20));
  const ticks = all("#chart-efficiency text[text-anchor=end]");
  saw.efficiencyTicks = ticks.map((node) => parseFloat(node.textContent));
  saw.lossLines = document.querySelectorAll("#chart-loss path.curve").length;
  const before = paths("chart-loss");
  press("Tokens");
  saw.axisMoved = paths("chart-loss").join() !== before.join();
  press("Logarithmic");
  press("Time");
  press("Steps");
  press("Logarithmic");
  saw.axisBack = paths("chart-loss").join() === before.join();
  point("#chart-loss svg", "pointermove", 0.5);
  saw.tip = document.querySelector("#chart-loss .tip").hidden ? "" : text("#chart-loss .tip");
}
function tryStep(saw) {
  const swatches = all("#timeline .swatch[style]");
  const seen = colours("#timeline canvas.main");
  saw.drawn = swatches.filter((s) => seen.has(getComputedStyle(s).backgroundColor)).length;
  saw.summary = text("#step-summary");
  const before = picture();
  change("#step", "0");
  saw.first = text("#step-summary");
  saw.redrawn = picture() !== before;
  document.querySelector("#next").click();
  saw.second = text("#step-summary");
  point("#chart-loss svg", "click", 0.6);
  saw.clicked = text("#step-summary");
  document.querySelector("#slowest button").click();
  saw.slowest = text("#step-summary");
  saw.marked = document.querySelectorAll("#curves .chosen").length;
}
function probe() {
  const saw = { title: text("h1"), costWords: text("#cost-words"), width: innerWidth };
  saw.warnings = all("#warnings:not([hidden]) li").map((line) => line.textContent);
  tryCurves(saw);
  saw.dots = document.querySelectorAll("#scatter path.dots").length;
  if (!document.querySelector("#step-view").hidden) tryStep(saw);
  saw.note = text("#step-note");
  saw.experts = !document.querySelector("#experts-section").hidden;
  if (saw.experts) {
    const before = document.querySelector("#heat image").getAttribute("href");
    change("#experts-layer", "1");
    saw.heatChanged = document.querySelector("#heat image").getAttribute("href") !== before;
  }
  saw.refined = all("#refined tbody tr").map((row) => row.textContent.replaceAll("\u00a0", " "));
  saw.refinedLines = document.querySelectorAll("#refined path.curve").length;
  saw.refinedHidden = document.querySelector("#refine-section").hidden;
  saw.pipeline = !document.querySelector("#pipeline-section").hidden;
  saw.ranks = all("#pipeline tbody tr").map((row) => row.textContent.replaceAll("\u00a0", " "));
  saw.bars = all("#pipeline .shares").map((bar) => {
    const whole = bar.getBoundingClientRect().width;
    return [...bar.children].map((part) => part.getBoundingClientRect().width / whole);
  });
  saw.stages = document.querySelectorAll("#stages tbody tr").length;
  document.querySelectorAll("details").forEach((node) => { node.open = true; });
  saw.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  saw.graphs = all("#graphs-section:not([hidden]) tbody tr").map((row) => row.textContent);
  saw.graphLines = all("#graphs path.curve").length;
  saw.differences = text("#differences");
  saw.errors = document.documentElement.dataset.errors || "";
  saw.ready = document.documentElement.dataset.ready || "";
  return saw;
}
let answer;
try {
  answer = probe();
} catch (error) {
  answer = { failed: String(error) + document.documentElement.dataset.errors };
}
parent.postMessage(JSON.stringify(answer), "*");
</script>
</body>
"""
FRAME = """<!doctype html><body><script>
addEventListener("message", (event) => { document.documentElement.dataset.probe = event.data; });
</script><iframe src="page.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe></body>
"""


def open_runs(folders, tmp_path, *, width, harm=("", "")):
    """What the probe saw of the page of these runs, and every complaint of the console."""
    write_run_page(tmp_path / "page.html", read_runs(folders))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = page.replace(*harm).replace("</body>\n", PROBE)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--window-size={width + 100},1000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = Seen(done.stdout, done.stderr)
    return seen.probe, seen.complaints


@pytest.mark.parametrize("width", [1400, pytest.param(390, marks=pytest.mark.long)])
def test_one_run(tmp_path, width):
    run = make_run(
        tmp_path / "moe",
        steps=60,
        lanes=8,
        batch=96,
        experts=(8, 8),
        depths=2,
        graphs=True,
        evals=True,
        pp=2,
        vpp=2,
        refined=True,
        config={"parallel": {"layout": "Ett|tt|ttm|L"}},
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [line | {"efficiency": 0.9} for line in lines])
    write_lines(run / "warnings.jsonl", [{"step": 9, "text": "<b>high</b>"}])
    saw, complaints = open_runs([run], tmp_path, width=width)
    assert "failed" not in saw, saw
    assert (complaints, saw["errors"], saw["ready"]) == ([], "", "yes")
    assert saw["warnings"] == ["Warning: <b>high</b>"]
    assert saw["width"] == width
    assert saw["overflow"] <= 0, "nothing sticks out of the page"
    assert saw["title"] == "Run moe"
    assert {"chart-loss", "chart-depths", "chart-balance", "chart-memory"} <= set(saw["charts"])
    assert saw["charts"][1] == "chart-own_reward_margin"
    assert "chart-mfu" not in saw["charts"], "no step has a value for it"
    assert saw["empty"] == []
    assert 80 < max(saw["efficiencyTicks"]) <= 100, "a share's axis ends at 100 %"
    assert saw["lossLines"] == 4, "raw, smoothed, and two evaluations"
    assert (saw["axisMoved"], saw["axisBack"]) == (True, True)
    assert "held-out" in saw["tip"]
    assert "The cost model is very good" in saw["costWords"]
    assert saw["dots"] == 1
    assert (saw["experts"], saw["heatChanged"]) == (True, True)
    assert saw["graphs"][0].startswith("All steps")
    assert saw["graphLines"] == 3, "whole, by halves, eagerly"
    assert saw["refined"][0] == "211–163021 ×9.5 ×20 % → 10 %"
    assert (len(saw["refined"]), saw["refinedLines"]) == (2, 4), "changes; two kinds, two profiles"
    check_steps(saw)
    check_pipeline(saw)


def check_pipeline(saw):
    assert saw["pipeline"]
    assert re.fullmatch(r"00 Ett2 ttm2\d(\.\d)? %5\d(\.\d)? %[12]\d(\.\d)? %25 %", saw["ranks"][0])
    assert saw["ranks"][1].startswith("11 tt3 L")
    assert saw["stages"] == 4
    for measured, predicted in (saw["bars"][:2], saw["bars"][2:]):
        forward, backward, bubble = measured
        assert backward == pytest.approx(2 * forward, rel=0.01), "as they were written"
        assert forward + backward + bubble == pytest.approx(1, abs=1e-3)
        assert predicted == pytest.approx([0.75, 0.25], abs=1e-3)


def check_steps(saw):
    assert saw["drawn"] >= 2, "colours of the legend are in the picture"
    assert saw["redrawn"]
    assert saw["summary"].startswith("Step 60:")
    assert saw["first"].startswith("Step 1:")
    assert saw["second"].startswith("Step 2:")
    assert saw["clicked"].startswith("Step 3"), "the click was in the middle of 60 steps"
    assert saw["slowest"].startswith("Step 30:"), "it waited for its data"
    assert saw["marked"] == len(saw["charts"])


@pytest.mark.parametrize("width", [1400, pytest.param(390, marks=pytest.mark.long)])
def test_several_runs(tmp_path, width):
    lr = {"train": {"lr": 1e-4}}
    runs = [
        make_run(tmp_path / "first", steps=45, evals=True),
        make_run(tmp_path / "a-run-with-a-rather-long-name-of-its-own", steps=20, config=lr),
        make_run(tmp_path / "third", steps=1, seed=3, journal=False),
    ]
    saw, complaints = open_runs(runs, tmp_path, width=width)
    assert "failed" not in saw, saw
    assert (complaints, saw["errors"], saw["ready"]) == ([], "", "yes")
    assert saw["overflow"] <= 0
    assert saw["title"] == "3 runs side by side"
    assert saw["empty"] == []
    assert saw["lossLines"] == 2 + 2 + 1 + 1, "raw and smoothed, evaluations, and two short runs"
    assert saw["dots"] == 2
    assert "train.lr" in saw["differences"]
    assert "1e-04" in saw["differences"] or "0.0001" in saw["differences"]
    assert "No steps.jsonl: third" in saw["note"]
    assert not saw["experts"]
    assert not saw["pipeline"]
    assert saw["refinedHidden"]


def test_a_run_with_metrics_alone_and_gaps(tmp_path):
    lines = [{"step": 1, "loss": None, "lr": 0.0}, {"step": 2, "loss": 2.0}, {"step": 3}]
    write_lines(tmp_path / "metrics.jsonl", lines)
    saw, complaints = open_runs([tmp_path], tmp_path, width=390)
    assert "failed" not in saw, saw
    assert complaints == []
    assert (saw["errors"], saw["ready"]) == ("", "yes")
    assert saw["note"] == "There is no steps.jsonl, so no timeline can be drawn."
    assert saw["overflow"] <= 0


def test_a_run_of_many_steps_shows_its_spike(tmp_path):
    lines = [
        {"step": n, "loss": 90.0 if n == 7777 else 2.0, "tokens": 10, "elapsed_s": 0.1}
        for n in range(1, 20_001)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    saw, complaints = open_runs([tmp_path], tmp_path, width=1400)
    assert (complaints, saw["errors"], saw["ready"]) == ([], "", "yes")
    assert "Steps 9," in saw["tip"], "a point stands for several steps"


def test_notices_a_script_that_fails(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    place = "showSlowest() {"
    saw, complaints = open_runs([run], tmp_path, width=1400, harm=(place, place + "missing();"))
    assert complaints
    assert "missing is not defined" in saw["failed"]
