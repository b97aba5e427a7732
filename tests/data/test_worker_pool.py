import os
import signal
import sys
from functools import partial
from importlib.machinery import ModuleSpec

import pytest

from longshore.data.prepare import run_tasks


def touch(folder, task):
    if task == "bad value":
        raise ValueError("this task is bad")
    if task == "bad type":
        raise TypeError("a fault in the code")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    with open(os.path.join(folder, task), "a") as file:
        file.write(f"{os.getpid()}\n")


def start(folder):
    return partial(touch, folder)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 9])
def test_every_task_once(tmp_path, workers):
    tasks = [f"task {i}" for i in range(5)]
    done = list(run_tasks(partial(start, tmp_path), tasks, workers))
    assert sorted(done) == tasks
    assert sorted(os.listdir(tmp_path)) == tasks
    processes = {(tmp_path / task).read_text() for task in tasks}
    assert len(processes) <= workers
    assert (f"{os.getpid()}\n" in processes) == (workers == 1)


def test_no_task(tmp_path):
    assert list(run_tasks(partial(start, tmp_path), [], 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("bad value", ValueError, "this task is bad"),
        ("bad type", RuntimeError, "in a worker:\n(.*\n)*TypeError: a fault in the code"),
        ("killed", ChildProcessError, "a worker ended with exit code -9"),
    ],
)
def test_faults_arrive(tmp_path, task, error, message):
    with pytest.raises(error, match=message):
        list(run_tasks(partial(start, tmp_path), ["good", task], 2))


def counting(task):
    yield from range(task)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_tells_how_far_it_is(workers):
    told = []
    done = run_tasks(start_counting, [2, 3], workers, on_part=lambda *part: told.append(part))
    assert sorted(done) == [2, 3]
    assert sorted(told) == [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]


def start_counting():
    return counting


@pytest.mark.slow
@pytest.mark.parametrize("is_module", [False, True], ids=["python mine.py", "python -m mine"])
def test_workers_do_not_run_the_script_again(tmp_path, monkeypatch, is_module):
    """One without a guard would start workers, or a training, in each worker."""
    script = tmp_path / "mine.py"
    script.write_text("raise SystemExit('the script ran again')")
    main = sys.modules["__main__"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setattr(main, "__spec__", ModuleSpec("mine", None) if is_module else None)
    spec = main.__spec__
    assert sorted(run_tasks(start_counting, [2, 3], 2)) == [2, 3]
    assert (main.__file__, main.__spec__) == (str(script), spec)
