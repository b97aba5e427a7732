"""Signals: the first stops a run after its step, a second Ctrl-C and a stuck run end at once."""

import os
import signal
import time

import pytest

from longshore.train import supervision as module
from longshore.train.supervision import Interrupted, RankStatus, exit_code, stop_on_signals


@pytest.fixture
def left(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(module, "leave", codes.append)
    return codes


def wait_for(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("number", "line", "code"),
    [
        (signal.SIGINT, "stopping after this step; saving (Ctrl-C again quits at once)", 130),
        (signal.SIGTERM, "stopping after this step; saving", 143),
        (signal.SIGHUP, "stopping after this step; saving", 129),
    ],
)
def test_the_first_signal_sets_a_flag(number, line, code, left):
    lines, before = [], signal.getsignal(number)
    with stop_on_signals(RankStatus(), report=lines.append) as stop:
        stop.can_save = True
        assert not stop.is_asked
        os.kill(os.getpid(), number)
        assert wait_for(lambda: stop.is_asked and lines)
        os.kill(os.getpid(), number)  # at once: from the terminal and from torchrun
    assert (lines, left, stop.number, exit_code(stop.number)) == ([line], [], number, code)
    assert signal.getsignal(number) == before


def test_ctrl_c_again_quits(left, monkeypatch):
    monkeypatch.setattr(module, "TWICE_S", 0.05)
    with stop_on_signals(RankStatus()) as stop:
        stop.can_save = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(lambda: stop.is_asked)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert left == [], "schedulers send it more than once"
        os.kill(os.getpid(), signal.SIGINT)
        assert wait_for(lambda: left == [130])


def test_before_the_first_step_it_raises(left):
    with pytest.raises(Interrupted) as caught, stop_on_signals(RankStatus()):
        signal.raise_signal(signal.SIGTERM)
    assert (caught.value.number, left) == (signal.SIGTERM, [])


def test_a_run_that_will_not_stop_is_ended_with_a_word(left, monkeypatch):
    """As seen by the thread, while the main thread hears nothing."""
    monkeypatch.setattr(module, "ANSWER_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    lines, answers = [], iter(["", "", "rank 3 has not moved", *[""] * 500])
    with stop_on_signals(
        RankStatus(), report=lines.append, will_not_stop=lambda since_s: next(answers)
    ) as stop:
        stop.can_save = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(lambda: left == [143])
    assert lines == ["stopping after this step; saving", "rank 3 has not moved"]


def test_a_rank_of_torchrun_in_its_first_step_is_let_be():
    now = 0.0
    status = RankStatus(lambda: now)
    peers = module._Peers(status, rank=0, ranks=2)
    status.at("forward", step=1, round=1)
    now = 300.0
    assert peers._stuck(300.0) == "", "how long a step takes is not known yet"
    status.at("forward", step=2, round=1)
    status.at("backward", round=1)
    now += 1.0
    status.at("forward", step=3, round=1)
    now += 30.0
    assert peers._stuck(30.0) == (
        "ended without a checkpoint of this step: it hangs in forward; no checkpoint was written"
    )


def test_what_is_ignored_stays_ignored(left):
    """nohup, or the parent of a rank, has decided."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(RankStatus()) as stop:
            stop.can_save = True
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.1)
            assert not stop.is_asked
    finally:
        signal.signal(signal.SIGHUP, before)
