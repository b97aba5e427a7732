"""The package as others get it: a wheel, installed into an empty environment, runs the demo.

The environment has Longshore from the wheel alone; torch and the other dependencies are those of
this one, so that nothing is loaded. The source tree is not on its path.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tests.end_to_end.command import environment

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ("src", "pyproject.toml", "README.md", "LICENSE")
LIMIT_S = 300


def call(*words, folder):
    """Stdout of a program that must succeed, without this process's paths."""
    others = {k: v for k, v in environment().items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env=others,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    place = tmp_path_factory.mktemp("package")
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / "source" / name, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, place / "source" / name)
    options = ("--wheel", "--no-isolation", "--outdir", place / "dist")
    call(sys.executable, "-m", "build", *options, place / "source", folder=place)
    (built,) = (place / "dist").glob("longshore-*.whl")
    return built


def dependencies():
    """The folders that this environment imports packages from, but for Longshore's source."""
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders = dict.fromkeys([*own, *(path for path in sys.path if path.endswith("-packages"))])
    return [folder for folder in folders if Path(folder).is_dir()]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the programs of an environment that has the wheel."""
    place = tmp_path_factory.mktemp("empty") / "environment"
    venv.create(place)
    programs = place / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    call(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=place)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(dependencies()), encoding="utf-8")
    return programs


def test_the_wheel_has_every_file_of_the_package(wheel):
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file()]
    names = {path.relative_to(ROOT / "src").as_posix() for path in files}
    wanted = {n for n in names if n.startswith("longshore/") and "__pycache__" not in n}
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("longshore/")}
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert inside == wanted
    assert "longshore/py.typed" in inside
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11"):
        assert line in text
    for extra in ("hf", "gpu", "tensorboard", "wandb"):
        assert f"Provides-Extra: {extra}" in text


@pytest.mark.fuzz
def test_an_empty_environment_runs_the_command_and_the_demo(is_fuzz, tmp_path, request):
    if not is_fuzz:
        pytest.skip("half a minute; in `make fuzz`")
    installed = request.getfixturevalue("installed")
    python, command = installed / "python", installed / "longshore"
    where = call(python, "-c", "import longshore; print(longshore.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    version = call(python, "-c", "import longshore; print(longshore.__version__)", folder=tmp_path)
    assert call(command, "--version", folder=tmp_path) == f"longshore {version}"
    call(command, "plan", "--demo", "--html", "plan.html", folder=tmp_path)
    assert (tmp_path / "plan.html").stat().st_size > 10_000

    words = ("train.steps=2", "data.batch=4", "--ranks", "2")
    assert "wrote runs/demo-1" in call(command, "train", *words, folder=tmp_path)
    call(command, "report", "runs/demo-1", folder=tmp_path)
    assert (tmp_path / "runs" / "demo-1" / "report.html").stat().st_size > 10_000
    assert os.listdir(tmp_path / "runs" / "demo-1" / "weights")
