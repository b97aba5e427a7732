"""What happens to a run from outside: signals, a dead rank, NaN, a full disk, files that vanish.

Every answer is one clear message and an exit code, on all ranks, and never a hang.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.end_to_end.command import LONGSHORE, call, environment, torchrun
from tests.end_to_end.killed import DATA, SMALL, Kill, Runs
from tests.metrics_file import read_metrics

from longshore.data.source import TokenizedSample
from longshore.data.store import write_store

STOP_S = 180


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return Runs(tmp_path, monkeypatch)


@pytest.fixture
def start(tmp_path):
    """Starts the command in a session of its own; ends what is left of it."""
    begun = []

    def begin(*words, command=LONGSHORE):
        process = subprocess.Popen(
            [*command, "train", *SMALL, "output.folder=run", "train.steps=100000", *words],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_for_steps(run, steps, process):
    """Until so many steps are in its metrics."""
    path = run / "metrics.jsonl"
    for _ in range(STOP_S * 20):
        if path.exists() and len(read_metrics(path)) >= steps:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    pytest.fail("the run does not come on")


def checkpoints_of(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.long
def test_sigterm_ends_a_run_with_a_checkpoint(start, tmp_path):
    process = start("--ranks", "2", "output.save_every=0")
    run = tmp_path / "run"
    wait_for_steps(run, 2, process)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=STOP_S)
    assert (process.returncode, out) == (143, "")
    done = len(read_metrics(run / "metrics.jsonl"))
    assert err == (
        "longshore: stopping after this step; saving\n"
        f"longshore: stopped after step {done} of 100000; resume with --resume run\n"
    )
    assert checkpoints_of(run) == [f"step-{done:08}"]
    assert not (run / "weights").exists()
    words = ("output.display=plain", f"train.steps={done + 1}")
    code, out, err = call(tmp_path, "train", "--resume", "run", *words)
    assert (code, err) == (0, "")
    assert f"run resumes after step {done}\n" in out
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [*range(1, done + 2)]


ASKED = """\
import os, pathlib, signal, threading, time
import torch.distributed as dist
from longshore.train import evaluation, supervision

heard = threading.Event()
take, sums = supervision.Stop.take, evaluation._sums
rounds = 0


def hear(self, number):
    answer = take(self, number)
    heard.set()
    return answer


supervision.Stop.take = hear


def ask():
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.wait(60)


def in_step_3(nll, batch):
    global rounds
    rounds += batch.round == 0
    if dist.get_rank() == 1 and rounds == 3 and batch.round == 0:
        ask()
    return nll


def in_evaluation(nll, batch):
    evaluation._sums = asking
    return nll


def asking(out, batch):
    if dist.get_rank() == 1 and not heard.is_set():
        ask()
    with pathlib.Path({rounds!r}).open("a") as file:
        file.write("round\\n")
    return sums(out, batch)
"""
HELD_OUT = (DATA[0].replace("data.mock", "data.eval_mock"), "data.eval_count=12")


@pytest.mark.long
def test_one_rank_is_asked_to_stop_and_all_do(runs, tmp_path, capfd):
    """After the step that runs, or the round of an evaluation; what is resumed is the same run."""
    rounds, name = tmp_path / "rounds", f"asked_{runs.module}"
    (tmp_path / f"{name}.py").write_text(ASKED.format(rounds=str(rounds)))
    words = (*HELD_OUT, "train.eval_every=4", "train.steps=4", "output.save_every=0")
    assert runs.train("whole", *words, ranks=2) == 0
    capfd.readouterr()

    assert runs.train("run", *words, f"train.loss={name}:in_step_3", ranks=2) == 143
    assert capfd.readouterr().err == (
        f"longshore: stopped after step 3 of 4; resume with --resume {tmp_path}/run\n"
    )
    assert checkpoints_of(tmp_path / "run") == ["step-00000003"]
    words += ("--resume",)
    assert runs.train("run", *words, f"train.loss={name}:in_evaluation", ranks=2) == 143
    assert capfd.readouterr().err == (
        "longshore: stopped after step 4 of 4, in its evaluation; resume with --resume "
        f"{tmp_path}/run\n"
    )
    assert rounds.read_text().splitlines() == ["round"] * 2, "one on each rank"
    assert not (tmp_path / "run/evals.jsonl").exists()
    assert not (tmp_path / "run/weights").exists()

    assert runs.train("run", *words, ranks=2) == 0
    assert runs.losses("run") == runs.losses("whole")
    evals = [(tmp_path / each / "evals.jsonl").read_text() for each in ("run", "whole")]
    assert evals[0] == evals[1] != ""
    whole = runs.weights("whole")
    assert all(torch.equal(tensor, whole[key]) for key, tensor in runs.weights("run").items())


def children(process):
    """Of a process, by number: the server of the ranks, and below it the ranks."""
    tasks = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in tasks.read_text().split()] if tasks.exists() else []


def listening(processes):
    """The addresses on which they listen, in hexadecimal."""
    links = [link for process in processes for link in Path(f"/proc/{process}/fd").glob("*")]
    sockets = {os.readlink(link) for link in links if link.is_symlink()}
    rows = [
        row.split()
        for kind in ("tcp", "tcp6")
        if (table := Path("/proc/net", kind)).exists()
        for row in table.read_text().splitlines()[1:]
    ]
    return {
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


LOCAL = {"0100007F", "7F000001", "0" * 31 + "1", "0" * 24 + "01000000"}


def test_two_ranks_in_a_hostile_folder_without_a_reader(start, tmp_path):
    """Files named as Python's own are not imported; nobody else is listened to; Ctrl-C saves."""
    for name in ("random", "json", "typing", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from here')\n")
    process = start("--ranks", "2", "output.save_every=0", "output.display=plain")
    assert process.stdout.readline() == "starting 2 ranks…\n"
    process.stdout.close()  # as `| head -1` does
    run = tmp_path / "run"
    wait_for_steps(run, 2, process)
    ranks = [rank for server in children(process.pid) for rank in children(server)]
    assert listening([process.pid, *ranks]) <= LOCAL
    seen = len(read_metrics(run / "metrics.jsonl"))
    wait_for_steps(run, seen + 1, process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=STOP_S)
    assert process.returncode == 130, err
    done = len(read_metrics(run / "metrics.jsonl"))
    assert err == (
        "longshore: stdout is closed; the run continues without it\n"
        "longshore: stopping after this step; saving (Ctrl-C again quits at once)\n"
        f"longshore: stopped after step {done} of 100000; resume with --resume run\n"
    )
    assert checkpoints_of(run) == [f"step-{done:08}"]


IMPATIENT = """\
import sys
from longshore.cli import launch
from longshore.cli.main import main

if __name__ == "__main__":
    launch.NOTICE_S = 2.0
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks in /proc")
def test_a_hung_rank_is_named_and_sigterm_answered(start, tmp_path):
    (tmp_path / "program.py").write_text(IMPATIENT)
    process = start("--ranks", "2", "output.save_every=1", command=[sys.executable, "program.py"])
    wait_for_steps(tmp_path / "run", 3, process)
    ranks = sorted(rank for server in children(process.pid) for rank in children(server))
    os.kill(ranks[1], signal.SIGSTOP)
    where = r"rank 1 has not moved for \d+ s: step \d+, .*; the others wait for it: step \d+, .*"
    while not re.fullmatch(rf"longshore: {where}\n", line := process.stderr.readline()):
        assert "has moved" in line or "not moved" in line, "a slow machine, before that"
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=STOP_S)
    assert (process.returncode, out) == (143, ""), err
    last = err.splitlines()[-1]
    told = re.fullmatch(
        rf"longshore: ended without a checkpoint of this step: {where}; the last checkpoint is of "
        r"step (\d+); resume with --resume run",
        last,
    )
    assert told, err
    assert f"step-{int(told[1]):08}" in checkpoints_of(tmp_path / "run")


@pytest.mark.long
def test_everything_is_killed_and_gone_on_with(start, tmp_path):
    """The command, its server and all ranks at once, as a machine that loses its power."""
    process = start("--ranks", "2", "output.save_every=1")
    run = tmp_path / "run"
    wait_for_steps(run, 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    seen = len(read_metrics(run / "metrics.jsonl"))
    words = ("output.display=plain", f"train.steps={seen + 1}")
    code, out, err = call(tmp_path, "train", "--resume", "run", *words)
    assert (code, err) == (0, "")
    assert "run resumes after step " in out
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [*range(1, seen + 2)]
    assert len(checkpoints_of(run)) == 2, "and nothing of the save that was killed"


def test_a_dead_rank_ends_the_others(runs, capfd):
    assert runs.train("run", ranks=2, kill=Kill([1], 3, 0.0)) == 1
    err = capfd.readouterr().err
    assert err.startswith("longshore: rank 1 was ended by SIGKILL (is the machine out of memory?)")


MEMORY = """\
import torch


def full(nll, batch):
    if batch.lane == 1 and batch.counts.tokens == {tokens}:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    return nll
"""


def test_memory_that_is_used_up_on_one_rank(runs, tmp_path, capfd):
    assert runs.train("good", "train.steps=3", ranks=2) == 0
    lines = read_metrics(tmp_path / "good" / "metrics.jsonl")
    (tmp_path / f"full_{runs.module}.py").write_text(MEMORY.format(tokens=lines[1]["tokens"]))
    capfd.readouterr()
    assert runs.train("bad", f"train.loss=full_{runs.module}:full", ranks=2) == 1
    out, err = capfd.readouterr()
    assert re.fullmatch(
        r"longshore: rank 1 is out of GPU memory in step 2, round 1 of \d, forward: \d+ tokens, "
        r"(\d+ of them its part of a pack of \d+ that 2 ranks share, )?"
        r"and 2.00 GiB more did not fit; parameters 0.0 GiB, gradients 0.0 GiB, optimizer 0.0 GiB; "
        r"lower plan.capacity, or set train.recompute=blocks or parallel.shard=zero3, or use more "
        r"ranks(, or lower plan.max_cp or plan.cp_size, so that fewer ranks share a pack)?\n",
        err,
    ), err
    assert out == ""


NAN = """\
def bad(nll, batch):
    # The third step has a sequence of which nothing can be learned.
    wrong = batch.counts.tokens == {tokens}
    return nll * float("nan") if wrong and batch.lane == 1 and batch.round == 0 else nll
"""


def test_a_loss_that_is_not_finite(runs, tmp_path, capfd):
    """The run ends, says where, keeps the batch and writes no checkpoint of it or after it."""
    assert runs.train("good", "train.steps=5", ranks=2) == 0
    lines = read_metrics(tmp_path / "good" / "metrics.jsonl")
    assert len({line["tokens"] for line in lines}) == 5
    (tmp_path / f"nan_{runs.module}.py").write_text(NAN.format(tokens=lines[3]["tokens"]))
    words = (f"train.loss=nan_{runs.module}:bad", "output.save_every=1")
    capfd.readouterr()
    assert runs.train("bad", *words, ranks=2) == 1
    run = tmp_path / "bad"
    out, err = capfd.readouterr()
    kept = [json.loads((run / f"failed-step-4/lane-{lane}.json").read_text()) for lane in (0, 1)]
    fault = kept[1]["rounds"][0]["fault"]
    assert fault["sequence"] == kept[1]["rounds"][0]["sequences"][0]["id"]
    assert (out, err) == (
        "",
        f"longshore: step 4: the loss is nan and the gradient norm nan; its sequences are in "
        f"{run}/failed-step-4; train.loss=nan_{runs.module}:bad is not finite where the "
        f"model's own loss is: its value at sequence {fault['sequence']}, position "
        f"{fault['position']}; look at the function's divisions, logarithms and roots\n",
    )
    assert len(read_metrics(run / "metrics.jsonl")) == 3
    assert [name for name in checkpoints_of(run) if name[0] != "."][-1] == "step-00000003"

    assert [lane["step"] for lane in kept] == [4, 4]
    assert kept[1]["rounds"][0]["loss"] == "nan"
    assert all(isinstance(part["loss"], float) for part in kept[0]["rounds"])
    journal = (tmp_path / "good" / "steps.jsonl").read_text().splitlines()
    named = {
        (sequence["id"], sequence["length"])
        for lane in kept
        for part in lane["rounds"]
        for sequence in part["sequences"]
    }
    assert sorted(length for _, length in named) == sorted(json.loads(journal[3])["lengths"])
    tensors = load_file(run / "failed-step-4/lane-1.safetensors")
    assert tensors["round.0.token_ids"].shape == tensors["round.0.targets.labels"].shape


LIMIT = """\
import pathlib, resource, torch.distributed as dist


def limited(nll, batch):
    if dist.get_rank() == {rank} and pathlib.Path({first!r}).exists():
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, hard))
    return nll
"""


def test_a_disk_that_takes_no_more(runs, tmp_path, capfd):
    """After the first checkpoint one rank alone cannot write past 64 KiB: all end together."""
    run = tmp_path / "run"
    first = str(run / "checkpoints/step-00000002")
    limit = LIMIT.format(first=first, rank=1, size=1 << 16)
    (tmp_path / f"limit_{runs.module}.py").write_text(limit)
    words = (f"train.loss=limit_{runs.module}:limited", "train.steps=1000")
    assert runs.train("run", *words, ranks=2) == 1
    out, err = capfd.readouterr()
    assert out == ""
    told = re.fullmatch(
        r"longshore: the checkpoint of step (\d+) cannot be written into (.*) \(File too large\); "
        r"the last good one is (.*); make room there, then resume with --resume\n",
        err,
    )
    assert told, err
    done = len(read_metrics(run / "metrics.jsonl"))
    assert int(told[1]) <= done < 1000
    assert told[2] == str(run / "checkpoints")
    good = f"{told[2]}/{[name for name in checkpoints_of(run) if name[0] != '.'][-1]}"
    assert told[3] == good
    assert runs.train("run", f"train.steps={done + 1}", "--resume", ranks=2) == 0
    assert checkpoints_of(run)[-1] == f"step-{done + 1:08}"


def test_metrics_that_cannot_be_written(runs, tmp_path, capfd):
    """Rank 0 alone writes them: one line, and the other rank ends too."""
    run = tmp_path / "run"
    limit = LIMIT.format(first=str(run / "metrics.jsonl"), rank=0, size=1000)
    (tmp_path / f"limit_{runs.module}.py").write_text(limit)
    words = (f"train.loss=limit_{runs.module}:limited", "output.keep=0")
    assert runs.train("run", *words, ranks=2) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(
        rf"longshore: {run}/\w+\.jsonl cannot be written \(.*\); make room there, then resume with "
        rf"--resume {run}\n",
        err,
    ), err


def store_of(folder):
    """Eight shards of one sequence each."""
    samples = [TokenizedSample(i, np.full(4, i, np.int32), np.ones(4, np.bool_)) for i in range(8)]
    write_store(folder, samples, shard_sequences=1)


def test_data_that_vanish_during_training(runs, tmp_path, capfd):
    """A shard that no rank has opened yet."""
    store_of(tmp_path / "made")
    gone = tmp_path / "made" / "shard-00006.arrow"
    (tmp_path / f"gone_{runs.module}.py").write_text(
        "import pathlib\n\n\ndef gone(nll, batch):\n"
        f"    pathlib.Path({str(gone)!r}).unlink(missing_ok=True)\n    return nll\n"
    )
    data = (f"data.path={tmp_path}/made", "data.batch=1", "data.shuffle=false", "data.prefetch=1")
    assert runs.train("run", f"train.loss=gone_{runs.module}:gone", ranks=2, data=data) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert str(gone) in err
    assert err.count("\n") == 1


PROGRAM = """\
import sys
from longshore.cli import launch
from longshore.cli.main import main

if __name__ == "__main__":
    launch.PRELOAD = ("broken",)
    sys.exit(main(["train", "--ranks", "2"]))
"""


def test_what_the_server_cannot_import_is_told(tmp_path):
    """A plain ImportError comes later, from the ranks; any other error ends the server."""
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["env", f"PYTHONPATH={tmp_path}", sys.executable]
    code, out, err = call(tmp_path, "program.py", command=command)
    assert (code, out) == (1, "starting 2 ranks…\n")
    assert err.endswith("ZeroDivisionError: division by zero\n")
    assert "EOF" not in err.splitlines()[-1]


@pytest.mark.long
def test_torchrun_restarts_and_goes_on(tmp_path):
    """Rank 1 kills itself once; the second time the group goes on from the checkpoint."""
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, signal\nimport torch.distributed as dist\nsteps = 0\n\n\n"
        "def once(nll, batch):\n    global steps\n    steps += batch.round == 0\n"
        "    if dist.get_rank() == 1 and steps == 6 and not pathlib.Path('died').exists():\n"
        "        pathlib.Path('died').touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return nll\n"
    )
    command = torchrun(2)
    command.insert(command.index("-m", 2), "--max-restarts=1")
    words = ("train.loss=mine:once", "output.folder=run-{n}", "output.display=plain")
    code, out, err = call(tmp_path, "train", *SMALL, *words, command=command)
    assert code == 0, err
    assert "run-1 resumes after step " in out
    assert not (tmp_path / "run-2").exists()
    assert len(read_metrics(tmp_path / "run-1" / "metrics.jsonl")) == 8
