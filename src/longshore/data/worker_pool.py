"""A pool of worker processes that end with their parent, even if it is killed.

In: a function that each worker calls once (to load what it needs) and that returns the function for
one task; the tasks. Out: each task when it is done, in the order of completion. With three tasks
and two workers, two run at once and the first to finish takes the third. An error in a worker is
raised here, and the other workers are stopped; a killed worker is an error too, not a hang. A task
may tell how far it is: its function then yields numbers, which go to `on_part`.

Workers do not import the script that runs: one that builds a Trainer at its top level, without
`if __name__ == "__main__"`, would train again in each of them. So what they call stands in modules.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

Task = TypeVar("Task")
Start = Callable[[], Callable[[Task], Iterable[int] | None]]
OnPart = Callable[[Any, int], None]


def _ignore(task: object, number: int) -> None:
    pass


def run_tasks(
    start: Start[Task], tasks: Sequence[Task], workers: int, *, on_part: OnPart = _ignore
) -> Iterator[Task]:
    """Runs all tasks; in this process where one worker is enough."""
    if min(workers, len(tasks)) > 1:
        yield from _in_processes(start, tasks, min(workers, len(tasks)), on_part)
    elif tasks:
        work = start()
        for task in tasks:
            for number in work(task) or ():
                on_part(task, number)
            yield task


def _in_processes(
    start: Start[Task], tasks: Sequence[Task], workers: int, on_part: OnPart
) -> Iterator[Task]:
    waiting = deque(tasks)
    processes: dict[Connection, SpawnProcess] = {}
    running: dict[Connection, Task] = {}
    try:
        for _ in range(workers):
            connection, process = _start_worker(start)
            processes[connection] = process
            running[connection] = waiting.popleft()
            with _error_if_dead(process):
                connection.send(running[connection])
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                with _error_if_dead(processes[ready]):
                    message = ready.recv()
                if isinstance(message, int):
                    on_part(running[ready], message)
                    continue
                if message is not None:
                    raise message
                yield running.pop(ready)
                if waiting:
                    running[ready] = waiting.popleft()
                    with _error_if_dead(processes[ready]):
                        ready.send(running[ready])
    finally:
        for connection, process in processes.items():
            process.kill()
            process.join()
            process.close()
            connection.close()


def _start_worker(start: Start[Task]) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_worker, args=(start, theirs), daemon=True)
    with _hidden_script():
        process.start()
    theirs.close()
    return mine, process


@contextlib.contextmanager
def _hidden_script() -> Iterator[None]:
    """The main module has no file and no name, so that a spawned process does not import it."""
    attributes = vars(sys.modules["__main__"])
    names = [name for name in ("__file__", "__spec__") if name in attributes]
    before: dict[str, Any] = {name: attributes[name] for name in names}
    attributes.update(dict.fromkeys(names))
    try:
        yield
    finally:
        attributes.update(before)


@contextlib.contextmanager
def _error_if_dead(process: SpawnProcess) -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        process.join()
        raise ChildProcessError(
            errno.ECHILD,
            f"a worker ended with exit code {process.exitcode}; if it ran out of memory, use fewer "
            "workers",
        ) from None


def _worker(start: Start[Any], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work = start()
        while True:
            for number in work(connection.recv()) or ():
                connection.send(number)
            connection.send(None)
    except EOFError:
        return
    except (ValueError, OSError) as error:
        connection.send(error)
    except Exception:
        connection.send(RuntimeError(f"in a worker:\n{traceback.format_exc()}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
