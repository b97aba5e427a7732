"""What a command changes around itself, and gives back."""

import os
import signal
import sys

import pytest

from longshore.cli.environment import (
    _Lossy,
    loopback,
    lossy_output,
    safe_path,
    signals_raise,
)
from longshore.train.stop import Interrupted

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONSAFEPATH")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_variables_are_set_and_taken_back(monkeypatch):
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with loopback(), safe_path():
        assert [os.environ[name] for name in NAMES] == ["lo", "lo", "1"]
    assert not any(name in os.environ for name in NAMES)


def test_an_interface_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo")])
    with loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_where_no_loopback_is_known(monkeypatch):
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "eth0")])
    with loopback():
        assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_output_without_a_reader_is_lost():
    reader, writer = os.pipe()
    stream = _Lossy(writer, "w")
    assert stream.write(b"one") == 3
    assert os.read(reader, 10) == b"one"
    os.close(reader)
    assert stream.write(b"four") == 4
    assert stream.write(b"five!") == 5
    stream.close()


def test_streams_that_are_not_the_processs_own_stay(capsys):
    with lossy_output():
        sys.stdout.write("seen\n")
    assert capsys.readouterr().out == "seen\n"


def test_signals_that_end_a_command():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught, signals_raise():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
