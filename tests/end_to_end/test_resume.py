"""Killed at any moment and resumed, a run ends as if nothing had been."""

import json
import random

import pytest
from tests.end_to_end.killed import Kill, Runs

from longshore.cli.main import main
from longshore.config.load import load_config
from longshore.train.checkpoint_files import newest_complete, read_index


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return Runs(tmp_path, monkeypatch)


def random_kill(randomly, ranks, left):
    """One rank, or all, in one of the steps that are left, also while a checkpoint is written."""
    everyone = [*range(ranks)]
    victims = everyone if randomly.random() < 0.3 else [randomly.choice(everyone)]
    return Kill(victims, randomly.randint(1, left), 0.2 * randomly.random() ** 2)


def check_same(runs, name, *, tolerance):
    want, got = runs.weights("whole"), runs.weights(name)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        worst = (got[key] - tensor).abs().max() / tensor.abs().max()
        assert worst <= tolerance, key
    assert runs.losses(name) == pytest.approx(runs.losses("whole"), rel=tolerance, abs=0)


def killed_and_resumed(runs, name, *, kills, seed, words, last_ranks=4):
    """A run that is killed so many times, each time resumed; the last time to its end."""
    randomly = random.Random(seed)
    for attempt in range(kills):
        done = len(runs.losses(name)) if attempt else 0
        kill = random_kill(randomly, 4, max(1, 8 - done - 2))
        code = runs.train(name, *words, *(["--resume"] if attempt else []), kill=kill)
        assert code in (0, 1), kill
        if code == 0:  # it was over before
            break
    assert runs.train(name, *words, "--resume", ranks=last_ranks) == 0


@pytest.mark.fuzz
@pytest.mark.parametrize("shard", ["zero3", "none"])
def test_killed_at_random_the_same_bits(runs, is_fuzz, shard, capfd):
    """While it saves, to 1e-9 where it was a pipeline; in `make fuzz` at random and on 2 lanes."""
    if not is_fuzz:
        pytest.skip("in `make fuzz`; test_faults.py kills a run and resumes it")
    words = [f"parallel.shard={shard}"]
    assert runs.train("whole", *words) == 0
    assert runs.losses("whole")[-1] < runs.losses("whole")[0]
    for seed in range(6 if is_fuzz else 0):
        killed_and_resumed(runs, f"same-{seed}", kills=2, seed=seed, words=words)
        check_same(runs, f"same-{seed}", tolerance=0)
    # As a pipeline, and resumed without one; the same bits again without it in `make fuzz`.
    for before, after, tolerance in (
        ("parallel.pp=2", "parallel.pp=1", 1e-9),
        *([("parallel.pp=1", "parallel.pp=1", 0)] if is_fuzz else []),
    ):
        name = f"save-{tolerance}"
        assert runs.train(name, *words, before, kill=Kill([1], saving=4)) == 1
        done = runs.folder / name / "checkpoints/step-00000002"
        assert newest_complete(runs.folder / name) == done
        assert runs.train(name, *words, after, "--resume") == 0
        check_same(runs, name, tolerance=tolerance)
    # Another number of lanes is in tests/ranks/test_checkpoint.py too.
    for seed in range(4 if is_fuzz else 0):
        killed_and_resumed(runs, f"two-{seed}", kills=1, seed=seed + 100, words=words, last_ranks=2)
        check_same(runs, f"two-{seed}", tolerance=1e-9)


def test_without_a_checkpoint_it_begins_anew_and_says_so(runs, capfd):
    """Killed before the first checkpoint; the lines of its steps are not there twice."""
    shown = "output.display=plain"
    kill = Kill([0, 1], 2, 0.0)
    assert runs.train("run", "output.save_every=0", ranks=2, kill=kill) == 1
    assert not (runs.folder / "run" / "checkpoints").exists()
    capfd.readouterr()
    assert runs.train("run", "output.save_every=0", shown, "--resume", ranks=1) == 0
    assert "run has no checkpoint, so it begins with step 1\n" in capfd.readouterr().out
    assert len(runs.losses("run")) == 8
    steps = (runs.folder / "run" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [*range(1, 9)]


def test_what_may_change_and_what_may_not(runs, capfd):
    """More steps on one rank, then another batch; {n} is the newest run of its name."""
    refine = "plan.refine=true"
    assert runs.train("run-1", "train.steps=3", refine, ranks=1) == 0
    first = (runs.folder / "run-1" / "config.toml").read_text()
    (runs.folder / "run-0").mkdir()
    words = ("--resume", "train.steps=4", "output.keep=1", "output.display=plain", refine)
    assert runs.train("run-{n}", *words, ranks=1) == 0
    out = capfd.readouterr().out
    assert "run-1 resumes after step 3\ntrain.steps was 3 and is 4 from here on\nplanning…\n" in out
    assert "\nstep 4 of 4" in out
    run = runs.folder / "run-1"
    assert (run / "config-until-step-3.toml").read_text() == first
    assert load_config(str(run / "config.toml")).train.steps == 4
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
    assert len(runs.losses("run-1")) == 4
    saved = read_index(run / "checkpoints/step-00000004").loader["refine"]
    assert {step for step, *_ in saved["rounds"]} == {1, 2, 3, 4}, "times of both runs"
    for word, told in (
        ("data.batch=7", "data.batch was 6 in"),
        ("data.seed=1", "data.seed was 0 in"),
        ("model.layers=1", "model.layers was 0 in"),
    ):
        assert runs.train("run-{n}", "--resume", word, ranks=1) == 2
        err = capfd.readouterr().err
        assert told in err
        assert "so set it back, or leave --resume out" in err

    # What fails, before the first step or in it, leaves the run's configuration as it was.
    kept = {path.name: path.read_text() for path in run.glob("*.toml")}
    refuses = f"train.loss={runs.module}:refuses"
    for ranks, words, told in (
        (1, ["train.steps=2"], "run-1 has already done 4 steps, more than the 2 asked for; raise "),
        (2, ["train.steps=5", refuses], "this loss takes no batch"),
    ):
        assert runs.train("run-{n}", "--resume", *words, ranks=ranks) == 2
        assert told in capfd.readouterr().err
        assert {path.name: path.read_text() for path in run.glob("*.toml")} == kept

    # By its folder, with its own recipe; --resume may stand before a word.
    assert main(["train", "--resume", str(run)]) == 0
    assert "run-1 is already finished: step 4 of 4 is done; " in capfd.readouterr().out
    assert runs.train("run-{n}", "--resume", "train.steps=4", ranks=1) == 0
    assert main(["train", "--resume", str(runs.folder)]) == 2
    assert "has no config.toml; name the folder of a run" in capfd.readouterr().err
