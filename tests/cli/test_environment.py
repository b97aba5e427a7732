"""What a command changes around itself, and where compiled code is cached."""

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from longshore.cli.environment import (
    FLASH_CACHE,
    FLASH_CACHE_FOLDER,
    _Lossy,
    exceeded_limit,
    keep_out_of_temp,
    lossy_output,
    safe_path,
)
from longshore.cli.main import main
from longshore.distributed.process_group import loopback
from longshore.train.supervision import Interrupted, signals_raise

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


@pytest.mark.parametrize(
    ("files", "memory", "line"),
    [
        (
            64,
            resource.RLIM_INFINITY,
            "the limit is 64 open files (ulimit -n), and a process of 2 ranks needs 88; raise it: "
            "ulimit -n 4096",
        ),
        (
            1024,
            800_000_000,
            "the limit is 800.0 MB of addresses (ulimit -v), and torch needs 2.0 GB and more; "
            "lift it: ulimit -v unlimited",
        ),
    ],
)
def test_limits_too_low_for_any_run_are_refused(monkeypatch, capsys, files, memory, line):
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_AS: memory}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert main(["train", "--ranks", "2"]) == 2
    assert capsys.readouterr().err == f"longshore: {line}\n"


def test_a_limit_behind_an_error_is_named(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_AS: 3_000_000_000}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    memory = exceeded_limit("RuntimeError: DefaultCPUAllocator: not enough memory: you tried to")
    assert memory.startswith("the limit is 3.0 GB of addresses (ulimit -v), and the run needs more")
    assert exceeded_limit("RuntimeError: shape mismatch") == ""
    limits[resource.RLIMIT_AS] = resource.RLIM_INFINITY
    assert exceeded_limit("MemoryError") == "", "the machine's memory, which other texts explain"
    assert exceeded_limit("OSError: Too many open files").startswith("the limit is 1024 open files")


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


CACHE_NAMES = (
    "ONEDNN_JIT_PROFILE",
    "DNNL_JIT_PROFILE",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "XDG_CACHE_HOME",
)


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for name in CACHE_NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_what_is_compiled_is_kept_in_the_home(clean, tmp_path):
    keep_out_of_temp()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/.cache/longshore/torchinductor"
    assert os.environ[FLASH_CACHE] == "1"
    assert os.environ[FLASH_CACHE_FOLDER] == f"{tmp_path}/.cache/longshore/flash-attention"
    assert os.environ["ONEDNN_JIT_PROFILE"] == "0"
    assert not (tmp_path / ".cache").exists()


def test_what_is_set_stays(clean):
    clean.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    clean.setenv("DNNL_JIT_PROFILE", "2")
    clean.setenv(FLASH_CACHE_FOLDER, "mine too")
    keep_out_of_temp()
    assert os.environ[FLASH_CACHE_FOLDER] == "mine too"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "ONEDNN_JIT_PROFILE" not in os.environ


def test_a_cache_that_is_off_stays_off(clean):
    clean.setenv(FLASH_CACHE, "0")
    keep_out_of_temp()
    assert os.environ[FLASH_CACHE] == "0"
    assert FLASH_CACHE_FOLDER not in os.environ


def test_without_a_home_the_folder_is_new_and_private(clean, tmp_path):
    clean.setenv("HOME", "/proc/none")
    clean.setattr("tempfile.tempdir", str(tmp_path))
    keep_out_of_temp()
    for name in ("TORCHINDUCTOR_CACHE_DIR", FLASH_CACHE_FOLDER):
        folder = Path(os.environ[name])
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_torch_writes_nothing_into_the_temporary_folder(clean, tmp_path):
    work = (
        "from longshore.cli.environment import keep_out_of_temp; keep_out_of_temp()\n"
        "import os, torch, torch._inductor.runtime.cache_dir_utils as dirs\n"
        "torch.nn.Linear(64, 64)(torch.randn(256, 64)).sum().backward()\n"
        "dirs.cache_dir(); print(os.path.exists(f'/tmp/perf-{os.getpid()}.map'))\n"
    )
    (tmp_path / "tmp").mkdir()
    clean.setenv("TMPDIR", str(tmp_path / "tmp"))
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert not list((tmp_path / "tmp").iterdir())
