"""The Trainer: steps, callbacks, checkpoints, resuming, and what it leaves of itself behind."""

import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.data.tiny import CHATML, word_tokenizer
from tests.hf.folders import qwen3
from tests.lazy import datasets
from tests.metrics_file import read_metrics
from tests.ranks.harness import run_ranks

from longshore import Trainer, load_config
from longshore.ops import backends
from longshore.run.folder import lock_run
from longshore.run.parts import open_held_out
from longshore.train.checkpoint_files import saved_steps
from longshore.train.supervision import RunError

LENGTHS = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 4,
    "max_seq_len": 96,
    "mean_seq_len": 24,
    "lognormal_sigma": 1.0,
}
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def settings(folder, **train):
    return {
        "model": {"preset": "tiny-qwen3", "layers": 1},
        "data": {"mock": LENGTHS, "count": 24, "batch": 6},
        "plan": {"capacity": 96},
        "train": {"steps": 4, "device": "cpu", "dtype": "float64", **train},
        "output": {"folder": folder},
    }


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_step_by_step_to_the_end_and_by_another_it_is_the_same_run(tmp_path):
    with Trainer(**settings(tmp_path / "steps")) as trainer:
        losses = [metrics["loss"] for metrics in trainer]
        assert trainer.step() is None
        assert (trainer.done, trainer.steps) == (4, 4)
        assert trainer.plan is not None
    seen = []
    with Trainer(
        **settings(tmp_path / "run"),
        on_step=lambda trainer, metrics: seen.append((trainer.done, metrics["loss"])),
    ) as trainer:
        assert trainer.run()["loss"] == losses[-1]
    assert seen == list(enumerate(losses, start=1))
    for name in ("steps", "run"):
        recorded = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [step["loss"] for step in recorded] == losses
        assert (tmp_path / name / "weights").is_dir()


@pytest.mark.slow
def test_a_folder_that_is_deleted_ends_the_run_with_a_checkpoint(tmp_path):
    """The settings are written again, and it resumes as if nothing had happened."""
    whole, run = settings(tmp_path / "whole"), tmp_path / "run"
    with Trainer(**whole) as trainer:
        losses = [metrics["loss"] for metrics in trainer]
    given = settings(run)
    given["output"]["save_every"] = 1

    def delete(trainer, metrics):
        if metrics["step"] == 2:
            trainer._parts.checkpoints.wait()
            shutil.rmtree(run)

    with Trainer(**given, on_step=delete) as trainer, pytest.raises(RunError) as caught:
        trainer.run()
    assert str(caught.value) == (
        f"{run} was deleted or moved while it was trained; stopped after step 2; its settings and "
        f"a checkpoint of this step are in a new {run}; resume with --resume {run}"
    )
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.toml"]
    with Trainer(resume=run) as trainer:
        assert [metrics["loss"] for metrics in trainer] == losses[2:]


def test_a_folder_that_another_run_has_taken_is_left_alone(tmp_path):
    run = tmp_path / "run"

    def replace(trainer, metrics):
        shutil.rmtree(run)
        run.mkdir()
        (run / "config.toml").write_text("of another")
        lock_run(run, "").close()

    with Trainer(**settings(run), on_step=replace) as trainer, pytest.raises(RunError) as caught:
        trainer.run()
    assert "was replaced while it was trained; stopped after step 1" in str(caught.value)
    assert sorted(path.name for path in run.iterdir()) == [".lock", "config.toml"]


@pytest.mark.slow
def test_a_closed_run_resumes_as_if_it_had_never_stopped(tmp_path):
    with Trainer(**settings(tmp_path / "whole")) as trainer:
        losses = [metrics["loss"] for metrics in trainer]
    with Trainer(**settings(tmp_path / "cut")) as trainer:
        assert [trainer.step()["loss"] for _ in range(2)] == losses[:2]
    assert not (tmp_path / "cut" / "weights").exists()
    assert saved_steps(tmp_path / "cut") == [2]
    config = (tmp_path / "cut" / "config.toml").read_text()
    with Trainer(resume=tmp_path / "cut", train={"steps": 9}) as trainer:
        assert trainer.steps == 9
    assert (tmp_path / "cut" / "config.toml").read_text() == config  # no step has worked with it
    with Trainer(resume=tmp_path / "cut") as trainer:
        assert trainer.done == 2
        assert [metrics["loss"] for metrics in trainer] == losses[2:]


def test_a_callback_evaluates_saves_and_exports_the_model_of_its_step(tmp_path):
    changed = settings(tmp_path / "run", eval_every=2)
    changed["data"] |= {"eval_mock": LENGTHS, "eval_count": 4}
    evaluated, here = [], []

    def on_step(trainer, metrics):
        if metrics["step"] in (1, 2):
            here.append(trainer.evaluate()["loss"])
            assert trainer.save().name == f"step-{metrics['step']:08}"

    with Trainer(
        **changed, on_step=on_step, on_evaluation=lambda _, metrics: evaluated.append(metrics)
    ) as trainer:
        trainer.run()
        assert trainer.export(tmp_path / "tuned") == tmp_path / "tuned"
        with pytest.raises(ValueError, match=r"export: .* already contains"):
            trainer.export(tmp_path / "tuned")
        assert trainer.evaluate()["loss"] == evaluated[-1]["loss"]  # a refusal is no failure
    assert [metrics["step"] for metrics in evaluated] == [2, 4]
    assert here[1] == evaluated[0]["loss"] != here[0]
    assert (tmp_path / "tuned" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_resumes_from_a_base_that_has_moved(tmp_path):
    """Its own weights are in the checkpoint; another base would be another run."""
    base, moved, other = tmp_path / "base", tmp_path / "moved", tmp_path / "other"
    qwen3(base)
    qwen3(other, seed=1)

    def words(folder):
        return {**settings(tmp_path / folder), "model": {"from_hf": base}}

    with Trainer(**words("whole")) as trainer:
        losses = [metrics["loss"] for metrics in trainer]
    with Trainer(**words("cut")) as trainer:
        first = [trainer.step()["loss"] for _ in range(2)]
    base.rename(moved)
    again = {"resume": tmp_path / "cut", "train": {"steps": 4}}
    with pytest.raises(ValueError, match=r"other is not the base that the run began with"):
        Trainer(**again, model={"from_hf": other})
    with Trainer(**again, model={"from_hf": moved}) as trainer:
        assert [*first, *(metrics["loss"] for metrics in trainer)] == losses


def test_it_prints_nothing_but_the_command_that_resumes_its_run_does(tmp_path, capfd):
    word_tokenizer(tmp_path / "tok", "a b", template=CHATML)
    (tmp_path / "texts.jsonl").write_text('{"text": "a b"}\n' * 6)
    changed = settings(tmp_path / "run", steps=1)
    changed["data"] = {
        "path": tmp_path / "texts.jsonl",
        "tokenizer": tmp_path / "tok",
        "cache": tmp_path / "cache",
        "batch": 6,
    }
    with Trainer(**changed) as trainer:
        trainer.run()
    assert capfd.readouterr() == ("", "")
    assert load_config(tmp_path / "run" / "config.toml").output.display == "auto"


def test_it_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment, threads = dict(os.environ), threading.active_count()
    with Trainer(**settings(tmp_path / "run", steps=1, kernels="plain")) as trainer:
        assert backends._plain
        assert {number: signal.getsignal(number) for number in before} == before
        with pytest.raises(ValueError, match="already has a default process group"):
            Trainer(**settings(tmp_path / "other"))
        trainer.step()
    assert not dist.is_initialized()
    assert not backends._plain
    assert torch.backends.mkldnn.enabled
    assert dict(os.environ) == environment
    assert threading.active_count() == threads
    for call in (trainer.step, trainer.run, trainer.evaluate, trainer.save):
        with pytest.raises(ValueError, match="this Trainer is closed"):
            call()
    trainer.close()


def fail(trainer, metrics):
    raise RuntimeError("no more of this")


def test_after_a_failure_another_can_follow(tmp_path):
    trainer = Trainer(**settings(tmp_path / "run"), on_step=fail)
    with pytest.raises(RuntimeError, match="no more of this"):
        trainer.step()
    with pytest.raises(ValueError, match="this Trainer has failed; build another, with resume="):
        trainer.step()
    trainer.close()
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), Trainer(**settings(tmp_path / "run-2")) as trainer:
        trainer.step()["step"] / 0
    assert not dist.is_initialized()
    with Trainer(**settings(tmp_path / "run-3", steps=1)) as trainer:
        assert trainer.run()["step"] == 1


def test_a_close_that_fails_leaves_all_the_same(tmp_path, monkeypatch):
    threads = threading.active_count()
    trainer = Trainer(**settings(tmp_path / "run"))
    trainer.step()
    monkeypatch.setattr(trainer, "_save_last", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.close()
    assert not dist.is_initialized()
    assert threading.active_count() == threads
    lock_run(tmp_path / "run", "").close()  # nobody else has it
    trainer.close()


def test_a_failure_does_not_wait_for_a_checkpoint_that_nobody_confirms(tmp_path):
    changed = settings(tmp_path / "run", eval_every=2)
    changed["data"] |= {"eval_mock": LENGTHS, "eval_count": 4}
    changed["output"]["save_every"] = 1
    threads, release = threading.active_count(), []

    def fail_in_evaluation(trainer, metrics):
        confirmed = trainer._parts.checkpoints._confirmed
        release.append(threading.Timer(60, confirmed.set))  # or this test would hang for ever
        release[0].start()
        raise RuntimeError("no more of this")

    with (
        pytest.raises(RuntimeError, match="no more of this"),
        Trainer(**changed, on_evaluation=fail_in_evaluation) as trainer,
    ):
        trainer.run()
    release[0].cancel()
    release[0].join()
    assert saved_steps(tmp_path / "run") == [1]  # that of step 2 was not confirmed
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert threading.active_count() == threads
    assert not dist.is_initialized()


def twice(nll, batch):
    return 2 * nll


def test_a_function_is_a_loss(tmp_path):
    losses = []
    for loss in ({}, {"loss": twice}):
        with Trainer(**settings(tmp_path / str(len(losses)), steps=1, **loss)) as trainer:
            losses.append(trainer.step()["loss"])
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-12)


def test_data_in_memory_are_data(tmp_path, monkeypatch):
    """A list of samples and a Dataset train as the file does, and a run of them resumes."""
    monkeypatch.chdir(tmp_path)
    rows = [{"input_ids": list(range(i, 2 * i + 3))} for i in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrays = [{"input_ids": np.array(row["input_ids"])} for row in rows]
    losses = []
    for given in ("rows.jsonl", arrays, datasets.Dataset.from_list(rows)):
        keys = settings(f"run-{len(losses)}", steps=1)
        keys["data"] = {"path": given, "eval_path": given, "batch": 8}
        with Trainer(**keys) as trainer:
            losses.append((trainer.step()["loss"], trainer.evaluate()["loss"]))
    assert losses[0] == losses[1] == losses[2]
    with Trainer(trainer.config, data=datasets.Dataset.from_list(rows), resume="run-2") as again:
        assert again.done == 1
    assert len(list(Path("runs/prepared").glob("dataset-*/state.json"))) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trian": {}}, r"there is no section \[trian\]; did you mean \[train\]"),
        ({"train": {"learning_rate": 1}}, "there is no train.learning_rate; use train.lr"),
        ({"learning_rate": 1}, r"there is no learning_rate; use train.lr \(keys are given by sec"),
        ({"data": {"path": [{"text": {1, 2}}]}}, "data.path: sample 0 cannot be written as JSON"),
        ({"train": 5}, "train is 5; it must be a table of its keys"),
        ({"train": {"steps": 2.5}}, "train.steps is 2.5; it must be a whole number"),
        ({"resume": "nowhere"}, "resume: nowhere has no config.toml"),
        (
            {"resume": "nowhere", "recipe": "[train]\nsteps = 2"},
            "resume: nowhere has no config.toml",
        ),
        ({"resume": True, "train": {"steps": 2}}, r"resume: which run\? there is none in runs"),
        ({"force": True}, "force works only with resume"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        Trainer(**given)
    assert not dist.is_initialized()


def test_a_dict_of_splits_is_refused():
    with pytest.raises(ValueError, match="is a DatasetDict; give a Dataset, such as one split"):
        Trainer(data=datasets.DatasetDict())


def test_what_cannot_be_done_is_refused_and_the_run_stays(tmp_path):
    changed = settings(tmp_path / "run", steps=1)
    changed["output"]["keep"] = 0
    with Trainer(**changed) as trainer:
        with pytest.raises(ValueError, match="there is no held-out data"):
            trainer.evaluate()
        with pytest.raises(ValueError, match=r"output\.keep is 0"):
            trainer.save()
        assert trainer.step()["step"] == 1


def test_groups_for_evaluation_are_made_on_the_loopback_interface_too(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "longshore.distributed.process_group.loopback_variables", lambda: {"OF_LOOPBACK": "lo"}
    )
    variables = []

    def make(*args, **options):
        variables.append(os.environ.get("OF_LOOPBACK"))
        return open_held_out(*args, **options)

    monkeypatch.setattr("longshore.run.trainer.open_held_out", make)
    changed = settings(tmp_path / "run")
    changed["data"] |= {"eval_mock": LENGTHS, "eval_count": 4}
    with Trainer(**changed) as trainer:
        trainer.evaluate()
        assert "OF_LOOPBACK" not in os.environ
    assert variables == ["lo", "lo"]  # when it is built, and when it is needed


def test_a_recipe_may_be_text_a_path_or_a_config(tmp_path):
    text = load_config(None, values=settings("runs/x")).to_toml()
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    configs = [load_config(text), load_config(path), load_config(str(path))]
    assert configs[0] == configs[1] == configs[2]
    assert load_config(text, ["train.steps=7"], values={"train": {"steps": 5}}).train.steps == 7


def own(metrics):
    """What a rank measures itself, as docs/python.md says."""
    page = Path(__file__).parents[2] / "docs" / "python.md"
    text = page.read_text(encoding="utf-8")
    names = text.partition("each rank measures itself: ")[2].partition(". ")[0]
    return {name: metrics[name] for name in re.findall(r"`(\w+)`", names) if name in metrics}


def as_torchrun(folder, port):
    """A rank of torchrun, whose store has all groups of the process, one after another."""
    rank = dist.get_rank()
    dist.barrier()  # the other may still be connecting
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    shared = []
    for number in range(2):
        with Trainer(**settings(f"{folder}/{number}", steps=2)) as trainer:
            assert trainer.config.parallel.ranks == 2
            shared.append([metrics.items() - own(metrics).items() for metrics in trainer])
            trainer.export(f"{folder}/tuned-{number}")
            with pytest.raises(ValueError, match="already contains"):  # on both ranks
                trainer.export(f"{folder}/tuned-{number}")
            refusal = ValueError("no architecture fits")
            with (
                patch("longshore.run.weights.choose_architecture", side_effect=refusal),
                pytest.raises(ValueError, match="no architecture fits"),
            ):
                trainer.export(f"{folder}/other")
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    return shared


def test_two_trainers_one_after_the_other_under_torchrun(tmp_path):
    with Trainer(**settings(tmp_path / "alone", steps=2)) as trainer:
        alone = [metrics["loss"] for metrics in trainer]
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    first, second = run_ranks(2, as_torchrun, str(tmp_path), store.port)
    assert first == second  # but for what a rank measures itself
    for each in first:
        losses = [dict(metrics)["loss"] for metrics in each]
        torch.testing.assert_close(losses, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("per", ["target", "sequence"])
def test_a_field_that_is_nan_is_named_as_the_cause(tmp_path, per):
    """It was the loss function that had to be looked at."""
    values = {"target": "[0, 1, NaN]", "sequence": "NaN"}
    row = f'{{"input_ids": [5, 6, 7], "advantages": {values[per]}}}\n'
    (tmp_path / "rows.jsonl").write_text(row * 2)
    given = settings(tmp_path / "run", loss="grpo", loss_options={"on_policy": True})
    given["data"] = {
        "path": str(tmp_path / "rows.jsonl"),
        "batch": 2,
        "cache": str(tmp_path / "cache"),
        "fields": [f"advantages:per_{per}:float32"],
    }
    with Trainer(**given) as trainer, pytest.raises(RunError, match="advantages of the data is Na"):
        trainer.step()
