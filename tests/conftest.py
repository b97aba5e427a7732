"""Which tests run, Hypothesis profiles, signals, and why tests were skipped, by reason.

`--part quick` runs what `make check` does: the folders that need no ranks, without the tests marked
`slow`. `--part rest` runs all others, and imports no file without them; together they are `pytest`.
The Hypothesis profile `default` is a fixed sample for every run, `fuzz` many fresh examples.
"""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", derandomize=True, max_examples=50, deadline=None, print_blob=True
)
settings.register_profile(
    "fuzz",
    derandomize=False,
    max_examples=10_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# Without a GPU the tests of Triton kernels run in its interpreter, if Triton is there at all. It
# reads this when it is imported; nothing but these tests runs kernels on a CPU.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

# One thread for each process, or workers and ranks wait for each other's: torch reads this when it
# is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)

# In the background SIGINT or SIGHUP may be ignored, here and in all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


HERE = Path(__file__).resolve().parent
ON_RANKS = {"cli", "end_to_end", "examples", "gpu", "ranks"}
"""Folders whose tests start processes, or need a GPU."""


def pytest_addoption(parser) -> None:
    parser.addoption("--part", choices=("quick", "rest"), help="what make check runs, or the rest")


def is_on_ranks(path: Path) -> bool:
    return path.relative_to(HERE).parts[0] in ON_RANKS


def pytest_ignore_collect(collection_path, config) -> bool | None:
    """A file none of whose tests would run is not even imported."""
    part, is_file = config.getoption("part"), collection_path.suffix == ".py"
    if part is None or collection_path == HERE:
        return None
    if is_on_ranks(collection_path):
        return True if part == "quick" else None
    if part == "rest" and is_file and "mark.slow" not in collection_path.read_text("utf-8"):
        return True
    return None


def pytest_collection_modifyitems(config, items) -> None:
    """Tests that take long run in `make fuzz` alone; others show the same in less time."""
    part = config.getoption("part")
    if part is not None:
        others = [item for item in items if is_quick(item) != (part == "quick")]
        items[:] = [item for item in items if is_quick(item) == (part == "quick")]
        config.hook.pytest_deselected(items=others)
    if PROFILE == "fuzz":
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="takes long: in `make fuzz`"))


def is_quick(item) -> bool:
    return item.get_closest_marker("slow") is None and not is_on_ranks(item.path)


@pytest.fixture
def is_fuzz() -> bool:
    """Whether this is `make fuzz`, which takes its time."""
    return PROFILE == "fuzz"


@pytest.fixture
def half_by_float32() -> Iterator[None]:
    """Half precision is multiplied in float32: the test does not depend on the CPU."""
    from tests.half import HalfByFloat32

    with HalfByFloat32():
        yield


def pytest_terminal_summary(terminalreporter) -> None:
    lines = skipped_lines(terminalreporter.stats.get("skipped", []))
    if lines:
        terminalreporter.section("skipped")
    for line in lines:
        terminalreporter.write_line(line)


def skipped_lines(reports) -> list[str]:
    """How many tests were skipped for each reason, the most first, and in which files."""
    files = defaultdict(list)
    for report in reports:
        path, _, reason = report.longrepr
        files[reason.removeprefix("Skipped: ")].append(os.path.relpath(path))
    by_count = sorted(files.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return [
        f"{len(paths):4} {reason} ({', '.join(sorted(set(paths)))})" for reason, paths in by_count
    ]
