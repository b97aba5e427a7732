from types import SimpleNamespace

import pytest

from longshore.run.loop import _show_phase, warmup_steps


def test_a_warmup_below_one_is_a_share_of_the_steps():
    given = ((0, 50), (1, 50), (7, 50), (0.03, 100), (0.07, 100), (0.03, 10), (0.5, 1))
    assert [warmup_steps(warmup, steps) for warmup, steps in given] == [0, 1, 7, 3, 7, 1, 1]


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
