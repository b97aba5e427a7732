"""Measurements run on the CPU, small; no test reads how long anything took."""

import json
from pathlib import Path

import pytest
import torch

from longshore.advisor import calibrate as measure
from longshore.advisor import calibrate as overheads
from longshore.advisor.calibrate import CalibrationOptions, Grid, calibrate
from longshore.advisor.calibrate_parts import make_module, references, runnable
from longshore.advisor.lone_steps import Outcome, median_error, random_steps
from longshore.advisor.machine import load_machine
from longshore.advisor.step_time import round_busy
from longshore.advisor.timing import Clock
from longshore.arch.presets import preset
from longshore.cli.main import main

CPU = torch.device("cpu")
TINY = preset("tiny-qwen3", layers=1)


@pytest.fixture
def small(monkeypatch):
    """A grid of 8 products, three parts, one model."""
    monkeypatch.setitem(measure.GRIDS, "cpu quick", Grid((8, 64), (16, 64), 1 << 10))
    wanted = [each for each in references("cpu") if each.kind in ("attention", "mlp", "embedding")]
    monkeypatch.setattr(measure, "references", lambda kind: wanted)
    monkeypatch.setattr(overheads, "models", lambda kind: [(TINY, [16])])
    monkeypatch.setattr(overheads, "ROUNDS", (1, 2))


def measured(monkeypatch, is_over):
    monkeypatch.setattr(Clock, "is_over", lambda clock, share=1.0: is_over)
    options = CalibrationOptions(CPU, torch.float32, budget=1.0)
    lines = []
    return list(calibrate(options, Clock(1.0, lines.append))), lines


def test_everything_is_measured_in_turn(small, monkeypatch):
    profiles, lines = measured(monkeypatch, is_over=False)
    assert [len(profile.parts) for profile in profiles] == [0, 1, 2, 3, 3, 3]
    last = profiles[-1]
    arithmetic = {name for name, origin in last.origins().items() if origin == "arithmetic"}
    assert arithmetic == {"graph_host", "message", "gather at CP size 8", "gather at CP size 16"}
    assert any("steps of 1 blocks" in line for line in lines)
    assert all(part.host == 0 for part in last.parts), "on a CPU the host computes"
    assert round_busy(last, TINY, [40], tokens=48, recompute=True).seconds > 0


def test_without_time_the_rest_stays_arithmetic_and_is_named(small, monkeypatch):
    profiles, _ = measured(monkeypatch, is_over=True)
    last = profiles[-1]
    assert last.parts == ()
    assert last.products.origin == "measured"
    assert last.origins()["optimizer"] == "arithmetic"
    assert "attention of tiny-qwen3" in last.notes[0]
    assert "overheads of steps" in last.notes[0]


@pytest.mark.parametrize("reference", references("cpu"), ids=lambda each: each.name)
def test_the_modules_are_run_with_all_gradients(reference, monkeypatch):
    module = make_module(reference, device=CPU, dtype=torch.float64)
    run = runnable(reference, module, (5, 3), device=CPU, dtype=torch.float64)
    monkeypatch.setattr("longshore.advisor.calibrate_parts._forget", lambda *tensors: None)
    run.forward()
    run.both()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert gradients
    assert all(grad is not None and grad.isfinite().all() for grad in gradients)


def test_random_steps_have_one_to_four_rounds():
    steps = random_steps(TINY, capacity=256, count=8, device=CPU)
    assert {len(step.rounds) for step in steps} >= {1, 2, 3, 4}
    for step in steps:
        lengths = [length for lengths in step.rounds for length in lengths]
        assert sorted(lengths) == sorted(each.length for each in step.plan.sequences)
        assert all(sum(a) <= b <= 256 for a, b in zip(step.rounds, step.tokens, strict=True))


def test_errors_are_relative_to_what_was_measured():
    outcomes = [Outcome("a", 1.1, 1.0), Outcome("b", 3.0, 4.0), Outcome("c", 1.0, 1.0)]
    assert [each.error for each in outcomes] == pytest.approx([0.1, -0.25, 0.0])
    assert median_error(outcomes) == pytest.approx(0.1)


def test_the_command_writes_a_profile_that_plans(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "--device", "cpu", "--budget", "1", "--out", "m.json"]) == 0
    out = capsys.readouterr().out
    assert "measured: products" in out
    assert "arithmetic: " in out
    assert load_machine("m.json").products.origin == "measured"
    Path("l.csv").write_text("900\n300\n77\n")
    words = ["plan", "l.csv", "--lanes", "2", "--capacity", "1024", "--cost", "m.json"]
    assert main([*words, "--model", "tiny-llama", "--json", "p.json"]) == 0
    assert json.loads(Path("p.json").read_text())["steps"]
    capsys.readouterr()
    assert main(words) == 2
    assert "with --model PRESET" in capsys.readouterr().err


def test_the_check_of_a_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["calibrate", "--check", "h200", "--device", "cpu"]
    assert main(words) == 2
    assert "measured in bfloat16" in capsys.readouterr().err
    data = load_machine("h200").as_json() | {"dtype": "float32"}
    Path("m.json").write_text(json.dumps(data))
    words = ["calibrate", "--check", "m.json", "--device", "cpu", "--layers", "1"]
    assert main([*words, "--capacity", "64", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("predicted") == 2
    assert "median error" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "none/m.json"], "none/m.json: cannot be written, there is no folder none"),
        (["--model", "qwen3-8b"], "--model: it is for --check PROFILE; leave it out"),
        (["--check", "h200", "--out", "x"], "--out: --check writes no profile; leave it out"),
        (["--check", "none"], "profile none: cannot be read"),
        (["--budget", "0"], "0 is not between 1 and 86400"),
        (["--device", "tpu"], "'tpu' is not one of auto, cpu, cuda"),
    ],
)
def test_wrong_options(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == 2
    assert message in capsys.readouterr().err
