"""How a rank's status is written and read, and which rank the others wait for."""

import json
import threading
import time
from dataclasses import asdict
from functools import partial
from types import ModuleType

import pytest

from longshore.train.supervision import (
    Beat,
    RankStatus,
    Watch,
    beat_path,
    beating,
    collective_of,
    last_saved,
    ranks_in_words,
    read_beat,
)


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
        assert (beat.rank, beat.progress, beat.folder) == (3, "step 12, round 2, forward", "runs/a")
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
    assert read_beat(beat_path(tmp_path, 0)).progress == "starting"


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


class Ranks:
    """Beats of several ranks at a time that a test sets."""

    def __init__(self, folder, ranks, **options):
        self.folder, self.now = folder, 1000.0
        self.watch = Watch(folder, ranks, clock=lambda: self.now, **options)
        self.count = 0

    def beat(self, rank, **values):
        self.count += 1
        beat = {
            "count": self.count,
            "step": 12,
            "round": 2,
            "phase": "forward",
            "moves": 100,
            "unmoved_s": 0.0,
            "longest_s": 0.0,
            "waits": "",
            "folder": "runs/a",
        }
        content = asdict(Beat(rank, **(beat | values)))
        beat_path(self.folder, rank).write_text(json.dumps(content))

    def look(self):
        self.watch.look()
        return self.watch


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path, 3)


WAITING = {"phase": "backward", "moves": 101, "waits": "all_reduce"}


def test_a_process_that_does_not_run(ranks):
    for rank in range(3):
        ranks.beat(rank, **({} if rank == 1 else WAITING))
    ranks.look()
    ranks.now += 65
    for rank in (0, 2):
        ranks.beat(rank, **WAITING, unmoved_s=64.0)
    watch = ranks.look()
    assert watch.stuck() == [1]
    assert watch.notice() == (
        "rank 1 has not moved for 65 s: step 12, round 2, forward (its process does not run); the "
        "others wait for it: step 12, round 2, backward, in all_reduce"
    )
    assert watch.will_not_stop(5.0)
    assert not watch.will_not_stop(1.0), "the ranks have only just been told"


def test_a_rank_that_is_in_no_collective(ranks):
    for rank in range(3):
        ranks.beat(rank, unmoved_s=61.0, waits="" if rank == 2 else "all_reduce")
    assert (
        ranks.look()
        .description()
        .startswith("rank 2 has not moved for 61 s: step 12, round 2, forw")
    )


def test_ranks_that_are_behind(ranks):
    for rank in range(3):
        ranks.beat(rank, unmoved_s=61.0, waits="all_reduce", moves=100 + (rank == 0))
    assert (
        ranks.look()
        .description()
        .startswith("ranks 1 and 2 have not moved for 61 s: step 12, round")
    )


def test_where_none_can_be_named(ranks):
    for rank in range(3):
        ranks.beat(rank, unmoved_s=61.0, step=0, round=0, phase="building the model")
    assert ranks.look().description() == "no rank has moved for 61 s: building the model"


def test_one_that_moves_is_enough(ranks):
    ranks.beat(0, unmoved_s=600.0)
    ranks.beat(1, unmoved_s=600.0)
    assert ranks.look().notice() == "", "rank 2 has not begun"
    ranks.beat(2, unmoved_s=3.0)
    assert ranks.look().notice() == ""
    assert not ranks.watch.will_not_stop(600.0)


def test_notices_come_rarer_and_rarer(ranks):
    said = []
    for seconds in range(0, 1000, 10):
        for rank in range(3):
            ranks.beat(rank, unmoved_s=float(seconds))
        said += [seconds] if ranks.look().notice() else []
    assert said == [60, 120, 240, 480, 960]


def test_slow_is_not_stuck(ranks):
    """A run whose places take 100 s each is let be for 300 s; the first step does not count."""
    for seconds, is_stuck in ((200.0, False), (301.0, True)):
        for rank in range(3):
            ranks.beat(rank, unmoved_s=seconds, longest_s=100.0)
        assert (ranks.look().notice() != "") == is_stuck
        assert ranks.watch.will_not_stop(50.0) == is_stuck


def test_before_times_are_known_a_long_step_is_let_be(ranks):
    """Nobody knows how long a step takes here: 20 s, or minutes for the first one."""
    for seconds, step, longest, is_ended in (
        (300.0, 1, 0.0, False),
        (601.0, 1, 0.0, True),
        (30.0, 3, 0.5, True),
    ):
        for rank in range(3):
            ranks.beat(rank, unmoved_s=seconds, step=step, longest_s=longest)
        assert ranks.look().will_not_stop(seconds) == is_ended, (seconds, step)


def test_a_save_is_never_cut_short(ranks):
    for rank in range(3):
        ranks.beat(rank, unmoved_s=500.0, phase="saving")
    assert not ranks.look().will_not_stop(500.0)


def test_of_ranks_that_write_only_when_stuck_the_missing_one_is_it(tmp_path):
    ranks = Ranks(tmp_path, 3, missing_is_stuck=True)
    for rank in (1, 2):
        ranks.beat(rank, **WAITING, unmoved_s=61.0)
    watch = ranks.look()
    assert watch.notice() == (
        "rank 0 gave no sign of life for 61 s; the others wait for it: step 12, round 2, "
        "backward, in all_reduce"
    )
    assert watch.speaker() == 1


def test_words():
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([3, 5, 7]) == "ranks 3, 5 and 7"


def test_the_last_checkpoint(tmp_path):
    assert last_saved("") == last_saved(str(tmp_path)) == "no checkpoint was written"
    for step in (4, 20, 8):
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    assert last_saved(str(tmp_path)) == (
        f"the last checkpoint is of step 20; resume with --resume {tmp_path}"
    )
