import json
import math

import pytest
from tests.report.run_folders import make_run, write_lines

from longshore.plan.planner import make_plan
from longshore.report.run_files import read_evals, read_metrics, read_run
from longshore.report.run_journal import read_journal


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", steps=4, evals=True, depths=2, experts=(4, 4))


def test_reads_all_of_a_folder(run):
    found = read_run(run)
    assert found.name == "run"
    assert found.steps.tolist() == [1, 2, 3, 4]
    assert found.config["train.lr"] == 5e-3
    assert [step for step, _ in found.evals["held-out"]] == [1, 2, 3, 4]
    assert list(found.evals) == ["held-out", "code"]
    assert {"depth_1", "depth_2"} <= set(found.metrics)
    assert list(found.journal.lines) == [1, 2, 3, 4]
    assert [len(layer) for layer in found.journal.lines[1].experts] == [4, 4]


def test_the_later_of_two_lines_for_a_step_wins(tmp_path):
    lines = [{"step": n, "loss": loss} for n, loss in [(1, 5.5), (2, 4.0), (3, 3.5), (2, 3.9)]]
    write_lines(tmp_path / "metrics.jsonl", lines)
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics["step"].tolist() == [1, 2, 3]
    assert metrics["loss"].tolist() == [5.5, 3.9, 3.5]
    write_lines(tmp_path / "evals.jsonl", [{"step": 1, "name": "a", "loss": x} for x in (3, 2)])
    assert read_evals(tmp_path / "evals.jsonl") == {"a": [(1, 2.0)]}


def test_what_is_null_or_missing_is_nan(tmp_path):
    lines = [{"step": 1, "loss": None, "skipped": True}, {"step": 2, "loss": 1, "mtp_losses": [7]}]
    lines[1]["loss_metrics"] = {"kl": 0.5, "ratio": None}
    write_lines(tmp_path / "metrics.jsonl", lines)
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(metrics["loss"][0])
    assert metrics["skipped"].tolist()[0] == 1
    assert math.isnan(metrics["depth_1"][0])
    assert metrics["depth_1"][1] == 7
    assert math.isnan(metrics["own_kl"][0])
    assert metrics["own_kl"][1] == 0.5
    assert "own_ratio" not in metrics
    assert all(math.isnan(value) for value in metrics["mfu"])


def test_a_warning_that_a_resumed_run_repeats_is_there_once(run):
    lines = [{"step": 0, "text": "no end token"}, {"step": 9, "text": "high"}]
    write_lines(run / "warnings.jsonl", [*lines, lines[0]])
    assert read_run(run).warnings == [(0, "no end token"), (9, "high")]


def test_half_a_line_at_the_end_is_left_out(run):
    for name in ("metrics.jsonl", "steps.jsonl", "evals.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"step": 5, "lo')
    found = read_run(run)
    assert found.steps.tolist() == [1, 2, 3, 4]
    assert list(found.journal.lines) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["metrics.jsonl", "steps.jsonl", "evals.jsonl"])
@pytest.mark.parametrize("harm", ['{"step": 2, "lo{"step": 3}', "[1, 2]", '{"step": "two"}'])
def test_a_broken_line_in_the_middle_names_file_and_line(run, name, harm):
    lines = (run / name).read_text().splitlines()
    (run / name).write_text("\n".join([lines[0], harm, *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=rf"{name}, line 2: "):
        read_run(run)


def test_a_value_of_the_wrong_kind_is_named(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": "low"}])
    with pytest.raises(ValueError, match=r"line 1: loss is 'low'; it must be a number or null"):
        read_metrics(tmp_path / "metrics.jsonl")
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "mtp_losses": 3}])
    with pytest.raises(ValueError, match=r"line 1: mtp_losses is 3"):
        read_metrics(tmp_path / "metrics.jsonl")
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss_metrics": 3}])
    with pytest.raises(ValueError, match=r"line 1: loss_metrics is 3"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_refuses_folders_that_are_no_runs(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is missing; name the folder of a run"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file is a file; name the folder"):
        read_run(tmp_path / "file")
    with pytest.raises(ValueError, match=r"has no metrics.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "los')
    with pytest.raises(ValueError, match=r"metrics.jsonl has no step"):
        read_run(tmp_path)


def test_a_run_may_have_metrics_alone(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0, "elapsed_s": 1.0}])
    found = read_run(tmp_path)
    assert (found.config, found.evals, dict(found.journal.lines)) == ({}, {}, {})
    (tmp_path / "config.toml").write_text("x = ")
    with pytest.raises(ValueError, match=r"config.toml: is not TOML"):
        read_run(tmp_path)


def test_a_plan_comes_back_from_the_journal(run):
    lengths = [3000, 900, 500, 17, 1]
    plan = make_plan(lengths, lanes=4, capacity=2048)
    line = json.loads((run / "steps.jsonl").read_text().splitlines()[0])
    rounds = [[[p.first_lane, p.cp_size, list(p.sequences)] for p in r.packs] for r in plan.rounds]
    (run / "steps.jsonl").write_text("")
    write_lines(run / "steps.jsonl", [{**line, "lengths": lengths, "rounds": rounds}])
    found = read_journal(run / "steps.jsonl").plan(1)
    assert found.rounds == plan.rounds
    assert found.setting.profile == plan.setting.profile
    assert [sequence.length for sequence in found.sequences] == lengths


@pytest.mark.parametrize(
    "harm",
    [
        {"lengths": []},
        {"rounds": [[[3, 2, [0]]]]},
        {"cost": {}},
        {"rounds": [[[0, 1, [999]]]]},
        {"lanes": 10**9},  # 22 GB, before
        {"lanes": 10**400},
        {"lanes": 0},
        {"lanes": 1 << 20, "rounds": [[[0, 1, [0]]]] * 17},
        {"capacity": 1 << 60},
        {"lengths": [1 << 60]},
        {"lanes": float("inf")},
    ],
)
def test_a_line_without_a_plan_is_named_when_it_is_drawn(run, harm):
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    write_lines(run / "steps.jsonl", [lines[0], {**lines[1], **harm}])
    journal = read_journal(run / "steps.jsonl")
    journal.plan(1)
    with pytest.raises(ValueError, match=r"steps.jsonl, line 2: has no valid plan"):
        journal.plan(2)


@pytest.mark.parametrize("name", ["metrics.jsonl", "steps.jsonl", "evals.jsonl"])
@pytest.mark.parametrize("step", [-1, 1 << 60, 10**400])
def test_an_absurd_step_is_named(run, name, step):
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    write_lines(run / name, [lines[0], {**lines[1], "step": step}])
    with pytest.raises(ValueError, match=rf"{name}, line 2: "):
        read_run(run)


def test_an_absurd_number_is_named(run):
    write_lines(run / "metrics.jsonl", [{"step": 1, "loss": 10**400}])
    with pytest.raises(ValueError, match=r"line 1: loss is 10+; it must be a number or null"):
        read_run(run)
