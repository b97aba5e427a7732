import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from longshore.cli.environment import keep_out_of_temp

NAMES = ("ONEDNN_JIT_PROFILE", "DNNL_JIT_PROFILE", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_what_is_compiled_is_kept_in_the_home(clean, tmp_path):
    keep_out_of_temp()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/.cache/longshore/torchinductor"
    assert os.environ["ONEDNN_JIT_PROFILE"] == "0"
    assert not (tmp_path / ".cache").exists()


def test_what_is_set_stays(clean):
    clean.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    clean.setenv("DNNL_JIT_PROFILE", "2")
    keep_out_of_temp()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "ONEDNN_JIT_PROFILE" not in os.environ


def test_without_a_home_the_folder_is_new_and_private(clean, tmp_path):
    clean.setenv("HOME", "/proc/none")
    clean.setattr("tempfile.tempdir", str(tmp_path))
    keep_out_of_temp()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
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
