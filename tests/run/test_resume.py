import os
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from longshore.config.load import load_config
from longshore.run.folder import OpenRun, newest_runs, reached_step, write_config
from longshore.run.resume import Start, _open, change_config, changed_settings, check_steps
from longshore.train.checkpoint_files import CheckpointIndex, begin_save, finish_save


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_run(name, *, steps=None):
    run = Path("runs", name)
    run.mkdir(parents=True)
    write_config(load_config(None), run)
    if steps:
        begin_save(run, steps, needed=0)
        finish_save(run, CheckpointIndex(steps, steps, 1, {}, {}, {}), keep=2)
    return run


def asked(*words):
    return load_config(None, words)


def open_run(config, *, steps):
    with ExitStack() as locked:
        return _open(config, Start(is_asked=True), locked, steps=steps)


def test_fewer_steps_than_are_done_are_refused_before_anything_changes():
    run = make_run("a", steps=13)
    before = sorted(run.rglob("*.toml")), (run / "config.toml").read_text()
    config = asked(f"output.folder={run}", "train.epochs=1")
    with pytest.raises(
        ValueError,
        match=r"runs/a has already done 13 steps, more than the 8 asked for, because .* is 1; .* "
        r"train.steps=13 to finish it now",
    ):
        open_run(config, steps=8)
    with pytest.raises(ValueError, match="has already done 13 steps, more than the 2 asked for"):
        check_steps(2, asked("train.steps=2"), run)
    assert (sorted(run.rglob("*.toml")), (run / "config.toml").read_text()) == before
    assert open_run(config, steps=13).is_resumed
    assert open_run(config, steps=14).is_resumed


@pytest.mark.parametrize("more", [[], ["model.lora.rank=4"]], ids=["full", "lora"])
def test_the_base_may_have_moved(more):
    run = Path("run")
    run.mkdir()
    write_config(asked("model.from_hf=here", *more), run)
    (change,) = changed_settings(asked("model.from_hf=there", *more), run)
    assert change == "model.from_hf was 'here' and is 'there' from here on"
    other = [] if more else ["model.lora.rank=4"]
    for words in (["model.from_hf=there", *other], ["model.preset=tiny-llama", *more]):
        with pytest.raises(ValueError, match="a run resumes with the data and the model it began"):
            changed_settings(asked(*words), run)


def test_a_kept_configuration_is_never_overwritten():
    run = make_run("a", steps=3)
    texts = [(run / "config.toml").read_text()]
    for steps in (4, 5, 6):
        config = asked("train.steps=" + str(steps))
        change_config(config, OpenRun(run, True, ("train.steps was …",)), step=3)
        texts.append((run / "config.toml").read_text())
    kept = ["config-until-step-3.toml", "config-until-step-3-2.toml", "config-until-step-3-3.toml"]
    assert [(run / name).read_text() for name in (*kept, "config.toml")] == texts
    assert len(set(texts)) == 4


def test_heartbeats_of_a_killed_run_are_removed():
    run = make_run("a", steps=3)
    (run / ".heartbeat").mkdir()
    (run / ".heartbeat" / "beat-1").touch()
    open_run(asked("output.folder=runs/a"), steps=3)
    assert not (run / ".heartbeat").exists()


def test_where_there_is_no_run_yet_a_new_one_begins_and_says_so():
    run = open_run(asked("output.folder=runs/mine-{n}"), steps=9)
    assert not run.is_resumed
    assert run.note == "--resume: there is no run to resume yet, so runs/mine-1 is a new one"
    assert (run.folder / "config.toml").is_file()


def test_the_newest_runs_with_their_step_and_age():
    assert newest_runs() == "there is none in runs; leave --resume out to begin a new one"
    now = time.time()
    for number, age in enumerate((200_000, 7300, 130, 20), start=1):
        run = make_run(f"r-{number}", steps=None if number == 2 else 10 * number)
        for path in run.iterdir():
            os.utime(path, (now - age, now - age))
    Path("runs/prepared").mkdir()
    assert newest_runs() == (
        "in runs there are runs/r-4 (step 40, less than a minute ago), runs/r-3 (step 30, 2 minutes"
        " ago), runs/r-2 (no checkpoint, 2 hours ago), runs/r-1 (step 10, 2 days ago); resume with "
        "--resume runs/r-4"
    )
    for number in range(5, 9):
        make_run(f"r-{number}")
    assert re.search(r" and 3 more; resume with --resume runs/r-\d$", newest_runs())
    assert reached_step(Path("runs/r-3")) == 30


def test_a_damaged_checkpoint_does_not_count():
    run = make_run("a", steps=13)
    (run / "checkpoints" / "step-00000013" / "checkpoint.json").write_text("{")
    assert reached_step(run) is None
    check_steps(2, replace(asked("train.steps=2")), run)
