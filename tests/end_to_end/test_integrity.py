"""What a run reads is what was written, and what the disk refuses is one line: on one rank."""

import errno
import json
import os
import shutil
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest
import torch.distributed as dist
from tests.end_to_end.killed import Runs

from longshore.cli.main import main
from longshore.data.source import TokenizedSample
from longshore.data.store import write_store
from longshore.train import checkpoint


class OneRank(Runs):
    """Runs in this process, which a failed one would end: its groups are taken down here."""

    def train(self, *words, **options):
        try:
            return super().train(*words, ranks=1, **options)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return OneRank(tmp_path, monkeypatch)


def store_of(folder, *, first=0, shard_sequences=4):
    """Twelve sequences; the same count and lengths for any `first`."""
    shutil.rmtree(folder, ignore_errors=True)
    samples = [
        TokenizedSample(i, np.full(4 + i, (first + i) % 64, np.int32), np.ones(4 + i, np.bool_))
        for i in range(12)
    ]
    write_store(folder, samples, shard_sequences=shard_sequences)
    return (f"data.path={folder}", "data.batch=3")


def one_line(capfd):
    """What it says on stderr, which is one line, and nothing of a traceback."""
    err = capfd.readouterr().err
    assert err.startswith("longshore: "), err
    assert err.count("\n") == 1, err
    return err.removeprefix("longshore: ").rstrip("\n")


def test_resume_compares_the_data(runs, tmp_path, capfd):
    data = store_of(tmp_path / "made")
    words = ("train.steps=2", "output.weights=false")
    assert runs.train("run", *words, data=data) == 0
    capfd.readouterr()
    more = ("--resume", "train.steps=3", "output.display=plain")

    store_of(tmp_path / "made", first=7)
    assert runs.train("run", *more, data=data) == 2
    told = one_line(capfd)
    assert "the data have changed since the checkpoint: they were 12 sequences (" in told
    assert told.endswith("or accept the new data with --resume --force")
    assert runs.train("run", *more, "--force", data=data) == 0
    assert "; --force accepts them\n" in capfd.readouterr().out

    # The same content in other shards is the same data; now that of the forced run.
    store_of(tmp_path / "made", first=7, shard_sequences=5)
    assert runs.train("run", *more[:1], "train.steps=4", data=data) == 0
    assert len(runs.losses("run")) == 4

    flipped = tmp_path / "made" / "loss_tokens.npy"
    content = bytearray(flipped.read_bytes())
    content[-8] ^= 1
    flipped.write_bytes(content)
    capfd.readouterr()
    assert runs.train("run", *more[:1], "train.steps=5", data=data) == 2
    assert f"{flipped}: is damaged (its SHA-256 does not match); copy it again" in one_line(capfd)


def test_resume_compares_made_up_lengths(runs, tmp_path, capfd):
    lengths = tmp_path / "lengths.csv"
    data = (f'data.mock={{mode="file",path="{lengths}"}}', "data.batch=3")
    lengths.write_text("length\n" + "7\n9\n30\n4\n" * 3)
    assert runs.train("run", "train.steps=2", data=data) == 0
    lengths.write_text("length\n" + "7\n9\n4\n30\n" * 3)
    capfd.readouterr()
    assert runs.train("run", "train.steps=3", "--resume", data=data) == 2
    assert "the data have changed" in one_line(capfd)


def test_nothing_but_text_is_left(runs, tmp_path, capfd):
    words = ("output.keep=0", "output.weights=false", "output.display=plain", "train.steps=2")
    assert runs.train("run", *words) == 0
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [".lock", "config.toml", "metrics.jsonl", "steps.jsonl"]
    assert capfd.readouterr().out.endswith("run: config.toml, metrics.jsonl\n")
    assert runs.train("run", *words, "--resume") == 0
    assert "run has no checkpoint, so it begins with step 1\n" in capfd.readouterr().out


@contextmanager
def small_disk(folder, size):
    """A file system of so many MB; skips where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here ({done.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("is_looked_for", [True, False], ids=["before", "while writing"])
def test_a_real_full_disk(runs, tmp_path, capfd, monkeypatch, is_looked_for):
    """Two checkpoints of 3.4 MB fit, and the third does not; then there is room, and it goes on."""
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    if not is_looked_for:
        monkeypatch.setattr(
            "longshore.train.checkpoint_files.check_room", lambda folder, needed: None
        )
    with small_disk(tmp_path / "disk", 9) as disk:
        words = ("output.weights=false", "output.keep=3")
        assert runs.train("disk/run", *words) == 1
        told = one_line(capfd)
        where = disk / "run" / "checkpoints"
        why = "it takes" if is_looked_for else "No space left on device); "
        assert f"the checkpoint of step 6 cannot be written into {where} ({why}" in told
        assert told.endswith(
            f"the last good one is {where}/step-00000004; make room there, then resume with "
            "--resume"
        )
        assert sorted(os.listdir(where)) == ["step-00000002", "step-00000004"]
        if is_looked_for:
            return
        subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
        (where / ".step-00000006.partial").mkdir()
        assert runs.train("disk/run", *words, "--resume") == 0
        assert sorted(os.listdir(where))[-1] == "step-00000008"
        assert not [name for name in os.listdir(where) if name.startswith(".")]


def refuse(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device", "there")


@pytest.mark.parametrize(
    ("what", "words", "told"),
    [
        ("run.resume.write_config", (), "there cannot be written (No space left on device); make "
         "room there, then start again"),
        ("run.weights.save_weights", ("output.keep=0",), "then write it again with --resume"),
        ("run.weights.write_checkpoint", ("output.export={folder}/hf", "output.keep=0"),
         "make room there, then longshore export "),
    ],
    ids=["config", "weights", "export"],
)  # fmt: skip
def test_files_that_cannot_be_written(runs, tmp_path, capfd, monkeypatch, what, words, told):
    monkeypatch.setattr(f"longshore.{what}", refuse)
    given = [word.format(folder=tmp_path) for word in words]
    assert runs.train("run", "train.steps=1", *given) == 1
    assert told in one_line(capfd)
    assert (tmp_path / "run").exists() == ("config" not in what)
    assert not [*tmp_path.rglob("*.partial*")]
    if what == "run.weights.save_weights":
        monkeypatch.undo()
        assert main(["train", "--resume", str(tmp_path / "run")]) == 0


def test_same_data():
    now = {"sequences": 3, "data": "abc", "seed": 1}
    state = {**now, "step": 4}
    assert checkpoint.same_data(state, now, is_forced=False) == (state, [])
    fewer = {**state, "sequences": 5}
    with pytest.raises(ValueError, match=r"were 5 sequences \(abc\), and are now 3 sequences"):
        checkpoint.same_data(fewer, now, is_forced=False)
    forced, notes = checkpoint.same_data(fewer, now, is_forced=True)
    assert (forced, len(notes)) == (state, 1)
    assert json.dumps(forced)
