from pathlib import Path

import pytest

from longshore.run.folder import check_new_folder, check_run_folder, make_run_folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_next_free_number():
    assert make_run_folder("runs/demo-{n}") == Path("runs/demo-1")
    assert make_run_folder("runs/demo-{n}") == Path("runs/demo-2")
    Path("runs/demo-7").mkdir()
    Path("runs/demo-x").mkdir()
    Path("runs/other-9").touch()
    assert make_run_folder("runs/demo-{n}") == Path("runs/demo-8")
    assert make_run_folder("{n}.run") == Path("1.run")
    assert all(path.is_dir() for path in (Path("runs/demo-8"), Path("1.run")))


def test_a_folder_by_name_is_new_or_empty():
    assert make_run_folder("a/b") == Path("a/b")
    assert make_run_folder("a/b") == Path("a/b")
    Path("a/b/config.toml").touch()
    Path("a/b-1").mkdir()
    for refused in (make_run_folder, check_run_folder):
        with pytest.raises(ValueError, match=r"a/b already contains config.toml; .* such as a/b-2"):
            refused("a/b")


def test_two_runs_at_once_get_two_folders(monkeypatch):
    honest = Path.mkdir
    Path("runs").mkdir()

    def another_was_first(path, *rest, **options):
        if path.name == "demo-1":
            honest(path, parents=True, exist_ok=True)
            raise FileExistsError(17, "File exists")
        honest(path, *rest, **options)

    monkeypatch.setattr(Path, "mkdir", another_was_first)
    assert make_run_folder("runs/demo-{n}") == Path("runs/demo-2")


def test_where_none_can_be_made(monkeypatch):
    Path("file").touch()
    for name in ("file/x", "file/x-{n}"):
        with pytest.raises(ValueError, match=r"output.folder: file/x.* cannot be created"):
            check_run_folder(name)
        with pytest.raises(ValueError, match=r"output.folder: file/x.* cannot be created \(Not"):
            make_run_folder(name)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=r"output.export: new cannot be created: .* write-prot"):
        check_new_folder("new", "output.export")


@pytest.mark.parametrize("name", ["{n}/x", "{n}-{n}"])
def test_the_number_stands_once_in_the_last_part(name):
    with pytest.raises(ValueError, match=r"\{n\} may be in its last part, once"):
        check_run_folder(name)


def test_an_empty_folder_that_is_write_protected(monkeypatch):
    Path("run").mkdir()
    check_run_folder("run")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "run")
    with pytest.raises(
        ValueError, match=r"output.folder: run is write-protected; make it writable"
    ):
        check_run_folder("run")
