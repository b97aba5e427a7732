"""Hypothesis profiles, signals, and why tests were skipped, one line for each reason.

Of the profiles, `default` is a fixed sample for every run, `fuzz` many fresh examples.
"""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator

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

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)

# In the background SIGINT or SIGHUP may be ignored, here and in all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items) -> None:
    """Tests that take long run in `make fuzz` alone; others show the same in less time."""
    if PROFILE == "fuzz":
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="takes long: in `make fuzz`"))


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
