"""A loss that is far too high is told once, in the log, in the summary and on the run's page."""

import pytest
from tests.data.tiny import word_tokenizer

from longshore import Trainer
from longshore.report.pages import read_runs, report_summary
from longshore.train.record import LossWatch


@pytest.mark.parametrize(
    ("loss", "losses", "told"),
    [
        ("", [5.6, 12, 12, 12, 12], [4]),  # 2 log 256 is 11.09
        ("", [5.6, 12, 12, 5, 12, 12, None, 12], [8]),
        ("", [5.6, 11, 11, 11], []),
        ("cross_entropy", [12, 12, 12], [3]),
        ("dpo", [0.7, 900, 900, 900], []),
        ("dpo", [0.7, 1001, 1001, 1001], [4]),
        ("mine:loss", [5000.0, 4e6, 4e6, 4e6], []),
        ("mine:loss", [-5000.0, 6e6, 6e6, 6e6], [4]),
    ],
)
def test_three_steps_far_too_high_are_told_once(loss, losses, told):
    watch = LossWatch(loss, 256)
    steps = [n for n, value in enumerate(losses, 1) if watch.warning(n, value, 0.1)]
    assert steps == told
    assert not (told and watch.last_warning())


def test_the_last_step_alone_is_told_at_the_end():
    watch = LossWatch("", 256)
    assert [watch.warning(1, 5.0, 0.1), watch.warning(2, 2e5, 0.1)] == ["", ""]
    assert watch.last_warning() == (
        "the loss is 200,000 at step 2, above 11.09, twice that of a uniform guess over 256 "
        "tokens; training has probably diverged; begin again with a lower train.lr (now 0.1) or "
        "a longer train.warmup"
    )
    assert watch.last_warning() == ""


def test_a_run_that_diverges_says_so_in_its_log_and_on_its_page(tmp_path, capfd):
    mock = {"mode": "distribution", "type": "uniform", "min_seq_len": 8, "max_seq_len": 32}
    keys = {
        "model": {"preset": "tiny-qwen3", "layers": 1},
        "data": {"mock": mock, "count": 24, "batch": 6},
        "plan": {"capacity": 96},
        "train": {"steps": 6, "lr": 100.0, "device": "cpu"},
        "output": {"folder": tmp_path / "run", "display": "plain"},
    }
    with Trainer(**keys) as trainer:
        trainer.run()
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(shown) == 1
    assert "twice that of a uniform guess over 256 tokens" in shown[0]
    data = read_runs([tmp_path / "run"])
    ((warning,),) = (run["warnings"] for run in data["runs"])
    assert shown == [f"warning: {warning['text']}"]
    assert f"  {shown[0]}" in report_summary(data)


def test_text_without_an_end_token_is_told_in_the_log_and_on_the_page(tmp_path, capfd):
    word_tokenizer(tmp_path / "none", "a b c", eos_token=None)
    (tmp_path / "texts.jsonl").write_text('{"text": "a b c a b c"}\n')
    keys = {
        "model": {"preset": "tiny-qwen3", "layers": 1},
        "data": {"path": tmp_path / "texts.jsonl", "tokenizer": tmp_path / "none", "batch": 1}
        | {"cache": tmp_path / "cache"},
        "train": {"steps": 2, "device": "cpu"},
        "plan": {"capacity": 96},
        "output": {"folder": tmp_path / "run", "display": "plain", "save_every": 1},
    }
    for steps in (1, 2):
        resume = tmp_path / "run" if steps == 2 else ""
        with Trainer(**keys | {"train": {"steps": steps, "device": "cpu"}}, resume=resume) as run:
            run.run()
        shown = capfd.readouterr().out
        assert shown.count("has no end token") == 1, shown
    ((warning,),) = (run["warnings"] for run in read_runs([tmp_path / "run"])["runs"])
    assert "has no end token after its last words" in warning["text"]
