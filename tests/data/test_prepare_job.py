"""The folder of `prepare` between two runs: killed, resumed, refused, started over."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.data.samples import WORDS, chat, files_of, run, write_lines
from tests.data.tiny import CHATML, word_tokenizer

from longshore.data import prepare as prepare_module
from longshore.data.store import Store


def test_a_store_that_lost_its_manifest_may_be_started_over(here):
    run("reference")
    run()
    Path("out/manifest.json").unlink()
    with pytest.raises(ValueError, match=r"out: .* without its manifest.json.* --start-over\)"):
        run()
    run(start_over=True)
    assert files_of(here / "out") == files_of(here / "reference")


def test_a_finished_store_is_left_alone(here):
    run()
    before = {name: os.stat(here / "out" / name).st_mtime_ns for name in files_of(here / "out")}
    again = run(workers=2)
    assert again.reused == len(Store("out").manifest.shards)
    assert again.manifest.sequences == 32
    after = {name: os.stat(here / "out" / name).st_mtime_ns for name in files_of(here / "out")}
    assert after == before


def test_killed_while_tidying_up(here):
    run("reference")
    run()
    Path("out/prepare.work").mkdir()
    Path("out/prepare.work/range-00003.json").write_text("{}")
    run()
    assert files_of(here / "out") == files_of(here / "reference")


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_or_start_over(here, monkeypatch, finished):
    run("reference", max_length=50, shard_bytes=3000)
    if finished:
        run()
    else:
        stop_at(monkeypatch, 8)
        with pytest.raises(Killed):
            run()
        monkeypatch.undo()
        monkeypatch.chdir(here)
    before = files_of(here / "out")
    with pytest.raises(
        ValueError, match=r"out: was started with other .*\(max_length, shard_bytes d"
    ):
        run(max_length=50, shard_bytes=3000)
    assert files_of(here / "out") == before
    run(max_length=50, shard_bytes=3000, start_over=True)
    assert files_of(here / "out") == files_of(here / "reference")


def test_changed_inputs_and_tokenizers_are_refused(here):
    run()
    with Path("chats.jsonl").open("a") as file:
        file.write(json.dumps({"messages": chat("Hi", "Yo")}) + "\n")
    with pytest.raises(ValueError, match=r"\(content, inputs differ\)"):
        run()
    write_lines(here / "chats.jsonl")
    with pytest.raises(ValueError, match=r"\(inputs differ\)"):
        run()  # the same size, but written after the store
    word_tokenizer(here / "tok", WORDS + " more", template=CHATML + "{# more #}")
    with pytest.raises(ValueError, match=r"\(tokenizer, template, inputs differ\)"):
        run()


class Killed(BaseException):
    """As good as a SIGKILL: nothing in the package handles it."""


def stop_at(monkeypatch, moment):
    """Stops before (even) or after (odd) the file number moment // 2 gets its name."""
    renames = iter(range(10**9))
    rename = Path.replace

    def stopping(path, target):
        number = next(renames)
        if moment == 2 * number:
            raise Killed
        rename(path, target)
        if moment == 2 * number + 1:
            raise Killed

    monkeypatch.setattr(Path, "replace", stopping)


@pytest.mark.slow
def test_stopped_at_every_moment_it_goes_on_to_the_same_bytes(here, monkeypatch):
    run("reference", shard_bytes=6000)
    shards = len(Store("reference").manifest.shards)
    moments = 0
    while True:
        with monkeypatch.context() as patch:
            stop_at(patch, moments)
            try:
                run(f"out{moments}", shard_bytes=6000)
                break
            except Killed:
                pass
        summary = run(f"out{moments}", shard_bytes=6000)
        assert files_of(here / f"out{moments}") == files_of(here / "reference"), moments
        assert summary.reused == min(max(0, (moments - 1) // 4), shards), "each record counts"
        moments += 1
    assert moments == 2 * (1 + 2 * shards + 1 + 4 + 1), "job, shard and record, rejected, index"


CHILD = """
import json, sys
from longshore.data.prepare import prepare

if __name__ == "__main__":
    prepare(**json.loads(sys.argv[1]), progress=lambda done, total: print(done, flush=True))
"""


def start_child(arguments):
    command = [sys.executable, "child.py", json.dumps(arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finished_shards(out):
    """The shards that have a record, by when they were written."""
    records = Path(out).glob("prepare.work/range-*.json")
    shards = [shard for record in records for shard in json.loads(record.read_text())["shards"]]
    return {s["file"]: Path(out, s["file"]).stat().st_mtime_ns for s in shards}


@pytest.mark.long
@pytest.mark.fuzz
def test_killed_at_random_it_goes_on_to_the_same_bytes(here):
    """SIGKILL to the parent, its workers left to themselves, again and again on one folder."""
    kills = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 4
    write_lines(here / "chats.jsonl", count=3000)
    settings = {"max_length": 100, "shard_bytes": 5000 if kills > 4 else 12_000}
    run("reference", **settings)
    Path("child.py").write_text(CHILD)
    arguments = {"inputs": "chats.jsonl", "tokenizer": "tok", "out": "out", "workers": 2}
    rng = random.Random(7)
    done = {}
    for _ in range(kills):
        child = start_child({**arguments, **settings})
        for _ in range(rng.randint(1, 8)):
            child.stdout.readline()
        time.sleep(rng.random() / 50)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        now = finished_shards("out")
        assert done.items() <= now.items(), "a finished shard was done again"
        done = now
    summary = run(**settings)
    assert summary.reused >= len(done) > 0
    kept = {name: Path("out", name).stat().st_mtime_ns for name in done}
    assert kept == done
    assert files_of(here / "out") == files_of(here / "reference")


def test_two_at_once_are_refused(here):
    running = iter([True])

    def meanwhile(done, total):
        if next(running, False):
            with pytest.raises(
                ValueError, match="out: another 'prepare' is writing to this folder"
            ):
                run()

    run(progress=meanwhile)
    assert next(running, None) is None


def test_progress_counts_what_is_there(here, monkeypatch):
    size = os.stat("chats.jsonl").st_size
    stop_at(monkeypatch, 6)
    with pytest.raises(Killed):
        run()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    seen = []
    run(progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (2000, size)
    assert seen[-1] == (size, size)


def no_leftovers(job, ranges, finish=prepare_module._finish):
    assert not [*job.work.glob("*.tmp")]
    finish(job, ranges)


@pytest.mark.parametrize("failing", [1, 3, 4])
def test_a_full_disk_is_told_and_the_rest_goes_on(here, monkeypatch, failing):
    run("reference")
    calls = iter(range(10**9))
    fsync = os.fsync

    def full(descriptor):
        if next(calls) == 2 * failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = rf"out/\S+: No space left on device; {(failing - 1) // 2} of \d+ shards are fin"
        with pytest.raises(OSError, match=message) as caught:
            run()
    assert caught.value.errno == errno.ENOSPC
    assert not [*(here / "out").rglob("*.tmp")]
    (here / "out/prepare.work/shard-00001.arrow.99.tmp").write_bytes(b"of a killed run")
    monkeypatch.setattr(prepare_module, "_finish", no_leftovers)
    run()
    assert files_of(here / "out") == files_of(here / "reference")
