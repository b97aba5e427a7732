import json
import re
from importlib.resources import files
from itertools import pairwise

import pytest
from tests.report.run_folders import make_run, write_lines

from longshore.report.pages import (
    RUN_SCRIPTS,
    RUN_STYLES,
    read_runs,
    report_summary,
    run_page,
    write_run_page,
)
from longshore.report.plan_page import page_data
from longshore.report.run_files import read_run
from longshore.report.run_page import (
    choose_steps,
    differences,
    run_page_data,
    slow_steps,
    steps_data,
)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", steps=12, evals=True)


def test_a_step_is_drawn_as_on_the_plan_page(run):
    found = read_run(run)
    plan = found.journal.plan(3)
    mine = steps_data(found)[2]
    same = page_data([plan], {})["steps"][0]
    assert mine["step"] == 3
    for key in ("lengths", "unit", "total", "overhead", "start", "end", "busy", "idle", "packs"):
        assert mine[key] == same[key], key
    line = lines_of(run / "steps.jsonl")[2]
    assert mine["elapsed"] == pytest.approx(line["elapsed_s"], rel=1e-4)
    assert mine["predicted"] == pytest.approx(line["predicted_s"], rel=1e-4)


def test_of_many_steps_first_last_and_slowest_are_kept(tmp_path):
    folder = make_run(tmp_path / "run", steps=700, batch=4)
    lines = lines_of(folder / "metrics.jsonl")
    lines[332]["elapsed_s"] = 1e3
    write_lines(folder / "metrics.jsonl", lines)
    chosen = choose_steps(read_run(folder))
    assert len(chosen) <= 200
    assert {1, 333, 700} <= set(chosen)
    gaps = [b - a for a, b in pairwise(chosen)]
    assert max(gaps) <= 5, "the others lie evenly between"
    few = choose_steps(read_run(folder), share=1e-9)
    assert {1, 333, 700} <= set(few)
    assert len(few) <= 12


def test_figures(tmp_path):
    common = {"tokens": 1_234_567_891, "elapsed_s": 2.0, "tokens_per_s": 5.0, "skipped": False}
    lines = [{"step": n, "loss": float(n), "data_wait_s": 0.5, **common} for n in (1, 2, 3)]
    lines += [{**common, "step": 4, "loss": None, "skipped": True}]
    lines += [{**common, "step": 5, "loss": None}]
    write_lines(tmp_path / "metrics.jsonl", lines)
    figures = read_runs([tmp_path])["runs"][0]["figures"]
    assert (figures["steps"], figures["loss"], figures["least_loss"]) == (5, 3, 1)
    assert (figures["skipped"], figures["no_loss"]) == (1, 1)
    assert (figures["tokens"], figures["seconds"]) == (5 * 1_234_567_891, 10)
    assert figures["data_wait"] == 0.15
    assert figures["mfu"] is None


def test_evaluations_stand_at_their_tokens_and_seconds(tmp_path):
    lines = [{"step": n, "loss": 1.0, "tokens": 100, "elapsed_s": 2.0} for n in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    evals = [{"step": n, "name": "held-out", "loss": 2.0 - n / 10} for n in (0, 2, 3)]
    write_lines(tmp_path / "evals.jsonl", evals)
    (found,) = read_runs([tmp_path])["runs"][0]["evals"]
    assert found["tokens"] == [0, 200, 300]
    assert found["seconds"] == [0, 4, 6]
    assert found["y"] == [2, 1.8, 1.7]


def slow_run(tmp_path, **odd):
    """Twenty steps alike but for the 10th."""
    usual = {"elapsed_s": 1.0, "data_wait_s": 0.1, "plan_s": 0.1, "tokens": 1000, "rounds": 2}
    usual |= {"efficiency": 0.9, "padding": 0.01}
    lines = [{"step": n, "loss": 1.0, **usual, **(odd if n == 10 else {})} for n in range(1, 21)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    return slow_steps(read_run(tmp_path))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"data_wait_s": 1.8}, "waited 1.8 s for data"),
        ({"data_wait_s": 1.8, "plan_s": 1.5}, "waited 1.8 s for data (planning took 1.5 s)"),
        ({"plan_s": 1.5}, "no reason in the recorded metrics"),
        ({"tokens": 3000}, "3.0 × the usual tokens"),
        ({"rounds": 5}, "5 rounds (usually 2)"),
        ({"efficiency": 0.4}, "plan efficiency 40% (usually 90%)"),
        ({"padding": 0.2}, "padding 20% (usually 1%)"),
        ({"padding": None, "tokens": None}, "no reason in the recorded metrics"),
    ],
)
def test_why_a_step_was_slow(tmp_path, odd, why):
    rows = slow_run(tmp_path, elapsed_s=3.0, **odd)
    assert len(rows) == 10
    assert (rows[0]["step"], rows[0]["times"]) == (10, 3)
    assert rows[0]["why"] == [why]
    assert rows[1]["why"][0].startswith("the first step")


def test_rounds_that_took_longer_than_predicted_are_a_reason(run):
    steps, metrics = lines_of(run / "steps.jsonl"), lines_of(run / "metrics.jsonl")
    steps[6]["elapsed_s"] = [4 * s for s in steps[6]["elapsed_s"]]
    metrics[6]["elapsed_s"] = 100.0
    write_lines(run / "steps.jsonl", steps)
    write_lines(run / "metrics.jsonl", metrics)
    row = slow_steps(read_run(run))[0]
    assert row["step"] == 7
    assert re.fullmatch(r"rounds took [345]\.\d × the time the cost model predicts", row["why"][-1])


def test_keys_that_differ(tmp_path):
    first = make_run(tmp_path / "a", steps=1)
    second = make_run(tmp_path / "b", steps=1, config={"train": {"lr": 1e-4, "clip": 2.0}})
    runs = [read_run(first), read_run(second)]
    assert differences(runs) == [
        {"key": "train.lr", "values": ["0.005", "0.0001"], "everywhere": True},
        {"key": "train.clip", "values": ["–", "2.0"], "everywhere": False},
    ]
    assert differences(runs[:1]) == []


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    folders = [make_run(tmp_path / name / "demo", steps=1) for name in "ab"]
    assert [run["name"] for run in read_runs(folders)["runs"]] == [str(f) for f in folders]
    with pytest.raises(ValueError, match="is given twice"):
        read_runs([folders[0], folders[0]])


def test_refuses_more_runs_than_colours(run):
    with pytest.raises(ValueError, match="9 runs were given; a page shows 1 to 8"):
        run_page_data([read_run(run)] * 9)
    with pytest.raises(ValueError, match="0 runs"):
        run_page_data([])


def test_text_cannot_leave_the_data_block(tmp_path):
    nasty = "</script><script>alert(1)</script> {{js}} <!-- & \u2028"
    folder = make_run(tmp_path / "run", steps=2, config={"model": {"preset": nasty}})
    text = run_page(read_runs([folder]))
    assert text.count("</script>") == 2
    data = json.loads(re.search(r'id="run-data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["runs"][0]["config"]["model.preset"] == nasty


def test_the_page_needs_nothing_from_outside(run, tmp_path):
    write_run_page(tmp_path / "page.html", read_runs([run]))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of SVG, which is not fetched"
    assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=|@import|url\(", text)
    assert "{{" not in text


@pytest.mark.parametrize("name", [name for name in (*RUN_SCRIPTS, *RUN_STYLES) if "run_" in name])
def test_no_piece_ends_its_own_element(name):
    piece = files("longshore.report").joinpath(name).read_text(encoding="utf-8")
    assert "</" not in piece
    assert piece.count("\n") < 400


@pytest.mark.slow
def test_a_long_run_makes_a_moderate_file(tmp_path):
    folder = make_run(tmp_path / "run", steps=5000, batch=64, lanes=8, experts=(16,) * 4)
    text = run_page(read_runs([folder]))
    assert len(text) < 3_000_000


def test_the_summary_says_how_it_went(tmp_path):
    first = make_run(tmp_path / "a", steps=8)
    second = make_run(tmp_path / "b", steps=8, config={"train": {"lr": 1e-4}}, journal=False)
    lines = report_summary(read_runs([first, second]))
    assert re.match(r"a: 8 steps, [\d,]+ tokens in \d+ s; loss \d", lines[0])
    assert "tokens/s" in lines[1]
    assert lines[2].startswith("  the cost model is very good: typical error")
    assert lines[3].startswith("b: 8 steps")
    assert lines[-1] == "the configurations differ in: train.lr"
