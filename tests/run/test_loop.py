from types import SimpleNamespace

import pytest

from longshore.run.loop import _show_phase


@pytest.mark.parametrize(
    ("device", "compiles", "shown"),
    [
        ("cpu", False, "first step…"),
        ("cpu", True, "first step (compiling)…"),
        ("cuda", False, "first step (compiling kernels)…"),
        ("cuda", True, "first step (compiling kernels)…"),
    ],
)
def test_the_first_step_says_why_it_is_slow(device, compiles, shown):
    job = SimpleNamespace(
        resolved=SimpleNamespace(compile=compiles),
        topology=SimpleNamespace(device=SimpleNamespace(type=device)),
    )
    lines = []
    record = SimpleNamespace(phase=lines.append)
    _show_phase(job, record, "first step")
    _show_phase(job, record, "waiting for data")
    assert lines == [shown, "waiting for data…"]
