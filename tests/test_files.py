import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from longshore import files
from longshore.files import (
    check_room,
    free_bytes,
    open_sealed,
    sealed_json,
    size_text,
    temporary_folder,
    write_atomically,
)


@pytest.mark.parametrize("indent", [None, 1])
def test_every_bit_of_sealed_json_is_noticed(indent):
    data = {"step": 40, "name": "größe", "blank": "0" * 64, "list": [1.5, None]}
    raw = sealed_json(data, indent=indent)
    assert open_sealed(raw) == data
    for at in range(len(raw)):
        for bit in range(8):
            other = bytearray(raw)
            other[at] ^= 1 << bit
            with pytest.raises(ValueError, match=r"."):
                open_sealed(bytes(other))


@pytest.mark.parametrize("raw", [b"[]", b"{}", b'{"sha256": 3}', b'{"sha256": "00"}', b"\xff"])
def test_what_has_no_seal_is_refused(raw):
    with pytest.raises(ValueError, match=r"."):
        open_sealed(raw)


def test_a_file_is_replaced_at_once(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    write_atomically(path, "old")
    path.chmod(0o640)
    write_atomically(path, b"new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640

    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: .*page.html'$"):
        write_atomically(path, "newer")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "new"


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    write_atomically("/dev/null", "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_room_is_looked_for_before(tmp_path, monkeypatch):
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(OSError, match=r"it takes [\d,.]+ GB, but only .* are free") as caught:
        check_room(tmp_path, 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    unknown = SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0)
    monkeypatch.setattr(files.os, "statvfs", lambda _: unknown)
    assert free_bytes(tmp_path) is None
    check_room(tmp_path, 1 << 60)


KILLED = """\
import os, signal, sys
from longshore.files import temporary_folder

with temporary_folder() as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporary_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    """Not those of the living, of others, or without an owner."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command, environment = [sys.executable, "-c", KILLED], {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    ).stdout.strip()
    assert Path(killed).parent == tmp_path
    assert Path(killed).is_dir()
    (tmp_path / "longshore-other").mkdir()
    with temporary_folder() as mine:
        assert not Path(killed).exists()
        with temporary_folder():
            assert Path(mine).is_dir(), "its process lives"
    assert [path.name for path in tmp_path.iterdir()] == ["longshore-other"]


def test_temporary_folders_of_other_users_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "longshore-x").mkdir()
    (tmp_path / "longshore-x" / "owner").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with temporary_folder():
        assert (tmp_path / "longshore-x").exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder():
        assert not (tmp_path / "longshore-x").exists()


def test_sizes_for_people():
    assert [size_text(size) for size in (0, 999, 1500, 2e6, 3.25e12)] == [
        *("0 bytes", "999 bytes", "1.5 kB", "2.0 MB", "3,250.0 GB")
    ]
