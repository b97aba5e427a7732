import errno
import json
import os
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from tests.metrics_file import read_metrics

from longshore.train import record as module
from longshore.train.display import StepMetrics, graphed_text
from longshore.train.record import RunRecord, append_line, cut_steps
from longshore.train.supervision import RunError, writing

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
    optional = ["balance_loss", "index_loss", "mtp_losses", "loss_metrics"]
    optional += ["graphed", "graph_gib"]
    assert [field.name for field in fields(StepMetrics)] == [*NAMES, *optional]
    more = json.loads(replace(METRICS, balance_loss=0.1, mtp_losses=(5.0, 6.0)).to_json())
    assert (more["balance_loss"], more["mtp_losses"]) == (0.1, [5.0, 6.0])
    own = {"reward_margin": 0.25, "reward_accuracy": None}
    assert json.loads(replace(METRICS, loss_metrics=own).to_json())["loss_metrics"] == own
    graphed = {"whole": 6, "halves": 2, "eager": 0}
    more = json.loads(replace(METRICS, graphed=graphed, graph_gib=1.5).to_json())
    assert (more["graphed"], more["graph_gib"]) == (graphed, 1.5)
    line = METRICS.to_json()
    assert list(json.loads(line)) == NAMES
    assert json.loads(line)["loss"] == 5.5
    assert json.loads(line)["mfu"] is None
    assert json.loads(line)["skipped"] is False


def test_graphs_in_a_line():
    graphed = {"whole": 6, "halves": 2, "eager": 0}
    start = "CUDA graphs: 8 layers ran 75% as a whole, 25% by halves"
    assert graphed_text(graphed, None) == start
    assert graphed_text(graphed, 1.5) == f"{start}; graphs take 1.50 GiB"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_null(value):
    data = json.loads(replace(METRICS, loss=value, grad_norm=value).to_json())
    assert (data["loss"], data["grad_norm"], data["lr"]) == (None, None, 3e-4)


def test_each_step_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("ab", 0) as file:
        for step in (1, 2, 3):
            append_line(file, replace(METRICS, step=step).to_json())
            assert [row["step"] for row in read_metrics(path)] == list(range(1, step + 1))
    with path.open("ab", 0) as file:
        append_line(file, replace(METRICS, step=4).to_json())
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("half", ["{", '{"step": 2, "loss": 1.', "x" * 10_000])
def test_half_a_line_is_taken_off(tmp_path, half):
    path = tmp_path / "metrics.jsonl"
    whole = METRICS.to_json() + "\n"
    path.write_text(whole + half)
    assert [row["step"] for row in read_metrics(path)] == [1]
    assert cut_steps(path, 1) == []
    with path.open("ab", 0) as file:
        append_line(file, replace(METRICS, step=2).to_json())
    assert path.read_text() == whole + replace(METRICS, step=2).to_json() + "\n"


def test_a_file_of_half_a_line_alone_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("x" * 9000)
    assert cut_steps(path, 1) == []
    assert path.read_text() == ""


def test_a_full_disk_is_told():
    with open("/dev/full", "ab", 0) as file, pytest.raises(OSError, match="No space left"):
        append_line(file, METRICS.to_json())


def test_a_line_that_is_cut_short_is_told(tmp_path, monkeypatch):
    honest = os.write
    with (tmp_path / "metrics.jsonl").open("ab", 0) as file:
        monkeypatch.setattr("os.write", lambda fd, line: honest(fd, line[:5]))
        with pytest.raises(OSError, match=r"only 5 of [0-9]+ bytes were written: .*metrics.jsonl"):
            append_line(file, METRICS.to_json())


def line_of(step):
    return replace(METRICS, step=step).to_json() + "\n"


@pytest.mark.parametrize(
    "broken",
    ["{\n", "\x00\x00\n", '{"loss": 3}\n', '["step"]\n', "\n", "[" * 10_000 + "\n"],
    ids=["brace", "zeros", "other", "list", "empty", "deep"],
)
def test_a_broken_line_in_the_middle_costs_no_other(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line_of(1) + broken + line_of(2) + line_of(3) + line_of(4) + '{"step": 5')
    assert cut_steps(path, 3) == [
        f"warning: {path}: 1 unreadable line(s) were moved to metrics.jsonl.unreadable"
    ]
    assert path.read_text() == line_of(1) + line_of(2) + line_of(3)
    assert (tmp_path / "metrics.jsonl.unreadable").read_text() == broken
    assert cut_steps(path, 3) == []
    assert path.read_text() == line_of(1) + line_of(2) + line_of(3)


def test_a_link_out_of_the_run_is_not_followed(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    run.mkdir()
    for text in (line_of(1) + line_of(4), line_of(4) + line_of(1)):  # cut off, or written anew
        other.write_text(text)
        (run / "metrics.jsonl").unlink(missing_ok=True)
        (run / "metrics.jsonl").symlink_to(other)
        with pytest.raises(RunError) as caught, writing(run):
            cut_steps(run / "metrics.jsonl", 3)
        assert str(caught.value) == (
            f"{run}/metrics.jsonl cannot be written (it is a link, and a run writes only into its "
            f"own folder); put a copy of the file in its place, then resume with --resume {run}"
        )
        assert other.read_text() == text


def test_steps_after_the_last_go_wherever_they_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_steps(path, 3) == []
    path.write_text(line_of(1) + line_of(4) + line_of(2))
    assert cut_steps(path, 3) == []
    assert path.read_text() == line_of(1) + line_of(2)
    assert cut_steps(path, 1) == []
    assert path.read_text() == line_of(1)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "(No space left on device); make room there, then"),
        (errno.EDQUOT, "(Disk quota exceeded); make room there, then"),
        (errno.EACCES, "(Permission denied); make it writable, then"),
        (errno.EIO, "(Input/output error); check the disk, then"),
    ],
)
def test_what_the_disk_refuses_is_one_line_and_no_partial_stays(tmp_path, number, told):
    partial = tmp_path / "checkpoints" / ".step-00000004.partial"
    partial.mkdir(parents=True)
    (tmp_path / ".weights.partial-4711").mkdir()
    with pytest.raises(RunError) as caught, writing(tmp_path):
        raise OSError(number, os.strerror(number), "a/metrics.jsonl")
    assert str(caught.value) == (
        f"a/metrics.jsonl cannot be written {told} resume with --resume {tmp_path}"
    )
    assert not partial.exists()
    assert not (tmp_path / ".weights.partial-4711").exists()


@pytest.mark.parametrize("failing", ["metrics.jsonl", "steps.jsonl"])
def test_a_record_that_cannot_be_opened_or_written(tmp_path, monkeypatch, failing):
    (tmp_path / failing).mkdir()
    with (
        pytest.raises(RunError, match=rf"{failing} cannot be written \(Is a directory\)"),
        RunRecord(tmp_path, display="none", steps=3, after=0, is_first=True),
    ):
        pass
    (tmp_path / failing).rmdir()

    def full(file, text):
        if file.name.endswith(failing):
            raise OSError(errno.ENOSPC, "No space left on device", file.name)

    monkeypatch.setattr(module, "append_line", full)
    monkeypatch.setattr("longshore.train.record.step_as_line", lambda report: {})
    with (
        RunRecord(tmp_path, display="none", steps=3, after=0, is_first=True) as record,
        pytest.raises(RunError, match=rf"{failing} cannot be written \(No space left"),
    ):
        record.write(SimpleNamespace(metrics=METRICS))
