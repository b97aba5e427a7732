import json
import os
from dataclasses import fields, replace

import pytest

from longshore.train.metrics import MetricsFile, StepMetrics, read_metrics

METRICS = StepMetrics(
    step=1,
    epoch=0,
    loss=5.5,
    loss_tokens=90,
    tokens=100,
    sequences=7,
    grad_norm=1.25,
    lr=3e-4,
    elapsed_s=0.5,
    tokens_per_s=200.0,
    tflops=None,
    mfu=None,
    rounds=2,
    efficiency=0.9,
    padding=0.01,
    plan_s=0.02,
    data_wait_s=0.0,
    memory_gib=None,
    skipped=False,
)
NAMES = [
    *("step", "epoch", "loss", "loss_tokens", "tokens", "sequences", "grad_norm", "lr"),
    *("elapsed_s", "tokens_per_s", "tflops", "mfu", "rounds", "efficiency", "padding"),
    *("plan_s", "data_wait_s", "memory_gib", "skipped"),
]


def test_a_line_has_just_these_names_in_this_order():
    assert [field.name for field in fields(StepMetrics)] == [*NAMES, "balance_loss", "mtp_losses"]
    more = json.loads(replace(METRICS, balance_loss=0.1, mtp_losses=(5.0, 6.0)).to_json())
    assert (more["balance_loss"], more["mtp_losses"]) == (0.1, [5.0, 6.0])
    line = METRICS.to_json()
    assert list(json.loads(line)) == NAMES
    assert json.loads(line)["loss"] == 5.5
    assert json.loads(line)["mfu"] is None
    assert json.loads(line)["skipped"] is False


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_null(value):
    data = json.loads(replace(METRICS, loss=value, grad_norm=value).to_json())
    assert (data["loss"], data["grad_norm"], data["lr"]) == (None, None, 3e-4)


def test_each_step_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2, 3):
            file.write(replace(METRICS, step=step))
            assert [row["step"] for row in read_metrics(path)] == list(range(1, step + 1))
    file.close()  # twice does no harm
    with MetricsFile(path) as file:
        file.write(replace(METRICS, step=4))
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("half", ["{", '{"step": 2, "loss": 1.', "x" * 10_000])
def test_half_a_line_is_taken_off(tmp_path, half):
    path = tmp_path / "metrics.jsonl"
    whole = METRICS.to_json() + "\n"
    path.write_text(whole + half)
    assert [row["step"] for row in read_metrics(path)] == [1]
    with MetricsFile(path) as file:
        file.write(replace(METRICS, step=2))
    assert path.read_text() == whole + replace(METRICS, step=2).to_json() + "\n"


def test_a_file_of_half_a_line_alone_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("x" * 9000)
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_a_full_disk_is_told():
    with MetricsFile("/dev/full") as file, pytest.raises(OSError, match="No space left"):
        file.write(METRICS)


def test_a_line_that_is_cut_short_is_told(tmp_path, monkeypatch):
    honest = os.write
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        monkeypatch.setattr("os.write", lambda fd, line: honest(fd, line[:5]))
        with pytest.raises(OSError, match=r"took 5 of [0-9]+ bytes; is the disk full\?"):
            file.write(METRICS)
