"""Local ranks: all do the work, and whatever happens to one of them is told and ends all."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from longshore.cli.launch import (
    RankError,
    check_ranks,
    gpu_count,
    launch,
)
from longshore.cli.main import main
from longshore.config.load import load_config
from longshore.distributed.process_group import Ranks, loopback_variables, ranks_from_environment
from longshore.train.supervision import (
    TWICE_S,
    Interrupted,
    RankStatus,
    RunError,
    beat_path,
    supervised,
)

CONFIG = load_config(None)


def config_in(folder):
    return load_config(None, [f"output.folder={folder}/run"])


def add_ranks(config, ranks):
    """Every rank writes the sum of all."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=ranks.rendezvous,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=30),
    )
    total = torch.tensor(ranks.rank + 1)
    dist.all_reduce(total)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    text = f"{total.item()} {ranks.local_size} {interface}"
    Path(f"{config.output.folder}-{ranks.rank}").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


def refuse(config, ranks):
    if ranks.rank == 1:
        raise ValueError("raise plan.max_cp")
    if ranks.rank == 0:
        raise RuntimeError("rank 1 failed: ValueError: raise plan.max_cp")
    time.sleep(60)


def crash(config, ranks):
    if ranks.rank == 2:
        raise OSError(28, "No space left on device")
    time.sleep(60)


def opens_too_many(config, ranks):
    if ranks.rank == 1:
        raise RuntimeError("[enforce fail at gloo/device.cc:186] rv != -1. Too many open files")
    time.sleep(60)


def die(config, ranks):
    if ranks.rank == 1:
        os.write(1, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def interrupt(config, ranks):
    """Its parent alone hears Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGHUP)
    if ranks.rank == 1:
        raise Interrupted(signal.SIGTERM)
    time.sleep(60)


def raises_keyboard_interrupt(config, ranks):
    if ranks.rank == 1:
        raise KeyboardInterrupt("of a user's own loss")
    time.sleep(60)


def memory_is_used_up(config, ranks):
    if ranks.rank == 1:
        raise RunError("rank 1 is out of GPU memory in step 3")
    time.sleep(60)


def in_step_3(config, ranks, then):
    """A rank in its third step, which says its process."""
    status = RankStatus()
    status.at("forward", step=3, round=1)
    status.folder = "runs/a"
    address = ranks.rendezvous
    attending = supervised(status, rank=ranks.rank, ranks=ranks.world_size, address=address)
    with attending as stop:
        stop.can_save = True
        while not all(beat_path(Path(address[7:]).parent, r).exists() for r in range(2)):
            time.sleep(0.01)
        Path(f"{config.output.folder}-{ranks.rank}").write_text(str(os.getpid()))
        then(ranks)


def keeps_on(config, ranks):
    in_step_3(config, ranks, lambda ranks: time.sleep(60))


def gives_up(config, ranks):
    def then(ranks):
        time.sleep(60 if ranks.rank else 1.5)
        raise RuntimeError("[gloo/unbound_buffer.cc:81] Timed out waiting 600000ms for recv")

    in_step_3(config, ranks, then)


def shout(config, ranks):
    sys.stdout.write(f"out {ranks.rank}\n")
    sys.stderr.write(f"err {ranks.rank}\n")


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_works(tmp_path, ranks):
    launch(add_ranks, config_in(tmp_path), ranks)
    found = [Path(tmp_path / f"run-{rank}").read_text() for rank in range(ranks)]
    interface = loopback_variables().get("GLOO_SOCKET_IFNAME")
    assert found == [f"{ranks * (ranks + 1) // 2} {ranks} {interface}"] * ranks


def test_one_rank_runs_here():
    seen = []
    launch(lambda config, ranks: seen.append((config, ranks, os.getpid())), CONFIG, 1)
    ((config, ranks, process),) = seen
    assert (config, process) == (CONFIG, os.getpid())
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_size) == (0, 1, 0, 1)
    assert ranks.rendezvous.startswith("file:///")


def test_a_refusal_is_told_before_what_it_did_to_others():
    with pytest.raises(ValueError, match=r"^raise plan.max_cp$"):
        launch(refuse, CONFIG, 3)


def test_a_failure_comes_with_its_traceback():
    with pytest.raises(RankError) as caught:
        launch(crash, CONFIG, 3)
    told = str(caught.value)
    assert told.startswith("rank 2 failed:\nTraceback")
    assert 'in crash\n    raise OSError(28, "No space left on device")' in told
    assert told.endswith("OSError: [Errno 28] No space left on device\n")


def test_a_limit_of_the_shell_is_told_in_one_line():
    with pytest.raises(RunError, match=r"^rank 1: the limit is \d+ open files \(ulimit -n\), and "):
        launch(opens_too_many, CONFIG, 2)


def test_a_death_is_told_with_the_last_words():
    with pytest.raises(RankError) as caught:
        launch(die, CONFIG, 2)
    assert str(caught.value) == (
        "rank 1 was ended by SIGKILL (is the machine out of memory?); it wrote:\nlast words"
    )


def test_an_interrupt_is_an_interrupt():
    with pytest.raises(Interrupted):
        launch(interrupt, CONFIG, 2)


def test_an_interrupt_that_a_rank_raises_itself_is_a_failure():
    """Ranks hear no Ctrl-C, so it is an error of a user's code, which has to be found."""
    with pytest.raises(RankError) as caught:
        launch(raises_keyboard_interrupt, CONFIG, 2)
    text = str(caught.value)
    assert text.startswith("rank 1 failed:\nTraceback")
    assert text.endswith("KeyboardInterrupt: of a user's own loss\n")


PROGRAM = """\
import sys
from longshore.cli import launch, train
from longshore.cli.main import main
from tests.cli import test_launch

if __name__ == "__main__":
    launch.PRELOAD = ()  # these stand-ins need no torch
    train.train = getattr(test_launch, sys.argv[1])
    sys.exit(main(["train", "--ranks", sys.argv[2], *sys.argv[3:]]))
"""


@pytest.fixture
def command(tmp_path):
    """`longshore train` with a stand-in for what a rank does."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))

    def start(work, ranks, *words):
        return subprocess.Popen(
            [sys.executable, str(program), work, str(ranks), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    return start


def test_rank_0_alone_writes(command):
    done = command("shout", 2)
    assert done.communicate(timeout=60) == ("starting 2 ranks…\nout 0\n", "err 0\n")
    assert done.returncode == 0


@pytest.mark.long
def test_exit_codes_of_a_real_run(command):
    quiet = "output.display=none"
    works = (("refuse", 2), ("crash", 3), ("refuse", 1), ("memory_is_used_up", 2))
    runs = [command(work, ranks, quiet) for work, ranks in works]
    out, err = runs[0].communicate(timeout=60)
    assert (runs[0].returncode, out, err) == (2, "", "longshore: raise plan.max_cp\n")
    out, err = runs[1].communicate(timeout=60)
    assert (runs[1].returncode, out) == (1, "")
    assert err.startswith("longshore: rank 2 failed:\nTraceback")
    out, err = runs[2].communicate(timeout=60)
    assert (runs[2].returncode, out) == (1, "")
    assert err.endswith("RuntimeError: rank 1 failed: ValueError: raise plan.max_cp\n")
    out, err = runs[3].communicate(timeout=60)
    assert (runs[3].returncode, out) == (1, "")
    assert err == "longshore: rank 1 is out of GPU memory in step 3\n"


def wait_for_ctrl_c(config, ranks):
    """Says its process, then sleeps."""
    Path(f"{config.output.folder}-{ranks.rank}").write_text(str(os.getpid()))
    time.sleep(60)


def started(folder, ranks):
    """The processes of the ranks, once all have said theirs."""
    files = [folder / f"run-{rank}" for rank in range(ranks)]
    for _ in range(600):
        if all(file.exists() and file.read_text() for file in files):
            return [int(file.read_text()) for file in files]
        time.sleep(0.1)
    pytest.fail("the ranks did not start")


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().split()[2] != "Z"


def all_end(processes):
    for _ in range(100):
        if not any(map(is_alive, processes)):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("kind", ["Ctrl-C", "SIGKILL"])
def test_however_it_ends_its_ranks_end_too(command, tmp_path, kind):
    run = command("wait_for_ctrl_c", 2, "output.folder=run")
    processes = started(tmp_path, 2)
    if kind == "Ctrl-C":
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=30)
        assert err == "longshore: stopped before the first step\n"
        assert (run.returncode, out) == (130, "starting 2 ranks…\n")
    else:
        run.kill()
        run.communicate(timeout=30)
    assert all_end(processes)


def wait_for_words(run, words):
    """Reads stderr up to a line with these words."""
    lines = []
    while words not in (line := run.stderr.readline()):
        assert line, lines
        lines.append(line)
    return line


def test_ctrl_c_twice_quits_at_once(command, tmp_path):
    """The first is for the ranks, which do not come to the end of their step."""
    run = command("keeps_on", 2, "output.folder=run")
    processes = started(tmp_path, 2)
    os.killpg(run.pid, signal.SIGINT)
    line = wait_for_words(run, "stopping")
    assert line == "longshore: stopping after this step; saving (Ctrl-C again quits at once)\n"
    time.sleep(TWICE_S + 0.1)
    assert all(map(is_alive, processes))
    os.killpg(run.pid, signal.SIGINT)
    assert run.communicate(timeout=30)[1] == "longshore: quit at once, without a checkpoint\n"
    assert run.returncode == 130
    assert all_end(processes)


def test_a_rank_that_the_others_gave_up_on_is_named(command, tmp_path):
    run = command("gives_up", 2, "output.folder=run", "output.display=none")
    processes = started(tmp_path, 2)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (1, "")
    assert re.fullmatch(
        r"longshore: rank 1 has not moved for \d+ s: step 3, round 1, forward; the others wait for "
        r"it: step 3, round 1, forward; the "
        r"others gave up after parallel.timeout_min minutes; no checkpoint was written\n",
        err,
    ), err
    assert all_end(processes)


def test_far_more_ranks_than_cores_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    check_ranks(16, way_out="")
    assert main(["train", "--ranks", "1000"]) == 2
    assert capsys.readouterr().err == (
        "longshore: 1000 ranks are too many for this machine with 2 cores; the limit is 16; lower "
        "--ranks (or parallel.ranks), or add --force-ranks\n"
    )
    assert main(["train", "--ranks", "1000", "--force-ranks", "--print-config"]) == 0


def test_the_environment_of_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_from_environment() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_from_environment() is None
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ranks_from_environment() == Ranks(3, 4, 1, 4, "env://")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_from_environment() == Ranks(3, 4, 1, 2, "env://")
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, LOCAL_RANK of the environment must be"):
        ranks_from_environment()


@pytest.mark.parametrize(("visible", "gpus"), [("", 0), ("-1", 0), ("0", 1), ("0,3", 2)])
def test_gpus_that_may_be_used(monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == gpus
