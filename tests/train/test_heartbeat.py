"""A rank's status is written without its main thread's help, and read back as it was."""

import threading
import time
from functools import partial
from types import ModuleType

from longshore.train.heartbeat import RankStatus, beat_path, beating, collective_of, read_beat


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def wait_for(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_where_a_rank_stands():
    clock = Clock()
    status = RankStatus(clock)
    status.at("waiting for data", step=5)
    clock.now = 100.0  # the first step compiles
    status.at("waiting for data", step=6)
    assert (status.step, status.moves, status.longest_s) == (6, 2, 0.0)
    clock.now = 107.0
    status.at("forward", round=2)
    clock.now = 110.0
    assert (status.step, status.round, status.phase) == (6, 2, "forward")
    assert (status.longest_s, status.unmoved_s) == (7.0, 3.0)


def test_beats_while_the_main_thread_is_busy(tmp_path):
    status = RankStatus()
    path = beat_path(tmp_path, 3)
    with beating(status, lambda: tmp_path, rank=3, period_s=0.02):
        status.at("forward", step=12, round=2)
        status.folder = "runs/a"
        assert wait_for(lambda: (beat := read_beat(path)) and beat.folder and beat.count > 2)
        beat = read_beat(path)
        assert (beat.rank, beat.place, beat.folder) == (3, "step 12, round 2, forward", "runs/a")
    assert not path.exists()


def test_the_first_step_is_told_at_once(tmp_path):
    """Whoever sends a signal then must know that there is something to save."""
    status, path = RankStatus(), beat_path(tmp_path, 0)
    with beating(status, lambda: tmp_path, rank=0, period_s=1000.0):
        assert wait_for(path.exists)
        status.at("waiting for data", step=1)
        assert wait_for(lambda: read_beat(path).step == 1)


def test_a_rank_that_failed_leaves_its_last_beat(tmp_path):
    try:
        with beating(RankStatus(), lambda: tmp_path, rank=0, period_s=0.02):
            assert wait_for(beat_path(tmp_path, 0).exists)
            raise OSError
    except OSError:
        pass
    assert read_beat(beat_path(tmp_path, 0)).place == "starting"


def test_a_quiet_rank_writes_only_while_it_does_not_move(tmp_path):
    clock, calls = Clock(), []
    status, path = RankStatus(clock), beat_path(tmp_path / "made", 0)
    with beating(
        status,
        lambda: tmp_path / "made",
        rank=0,
        quiet_s=30.0,
        period_s=0.02,
        after=lambda: calls.append(0),
    ):
        time.sleep(0.1)
        assert (path.exists(), calls) == (False, [])
        clock.now = 31.0
        assert wait_for(path.exists)
        status.at("backward")
        assert wait_for(lambda: not path.exists())
    assert calls


def test_what_is_no_beat_is_none(tmp_path):
    for text in ("", "{", "[]", '{"rank": 3}'):
        (tmp_path / "beat").write_text(text)
        assert read_beat(tmp_path / "beat") is None
    assert read_beat(tmp_path / "none") is None


def in_module(name: str, code: str):
    module = ModuleType(name)
    exec(code, module.__dict__)  # its functions say that they are of this module
    return module


def test_the_collective_that_a_thread_is_in():
    """The innermost calls of torch, below the first that is not."""
    torch_part = in_module("torch.distributed.x", "def all_reduce(wait): wait()")
    outer = in_module("torch.distributed.fsdp", "def forward(inner, wait): inner(wait)")
    ours = in_module("mine", "def model(wait): wait()")
    cases = (
        (lambda wait: torch_part.all_reduce(wait), "all_reduce"),
        (lambda wait: outer.forward(ours.model, wait), ""),
    )
    for call, expected in cases:
        lock = threading.Lock()
        lock.acquire()  # the wait for it is in C, as that of a collective is
        thread = threading.Thread(target=call, args=(lock.acquire,), daemon=True)
        thread.start()
        time.sleep(0.1)
        assert wait_for(partial(is_in, thread, expected)), expected
        lock.release()
        thread.join()
    assert collective_of(-1) == ""


def is_in(thread, name):
    return collective_of(thread.ident) == name
