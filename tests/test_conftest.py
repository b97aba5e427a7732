"""What `make test` makes of warnings, of skipped tests and of half precision."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from tests.conftest import HERE, is_quick, pytest_ignore_collect, skipped_lines


def warn_from(module, text="old", category=UserWarning):
    """A warning as that module would raise it; what is only shown is not shown."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda *_, **__: None
        warnings.warn_explicit(text, category, "file.py", 1, module=module)


@pytest.mark.parametrize("module", ["longshore.ops.ssd", "tests.ops.test_ssd"])
def test_our_own_warnings_are_errors(module):
    with pytest.raises(DeprecationWarning):
        warn_from(module, category=DeprecationWarning)


def test_those_of_others_and_of_the_cpu_are_not():
    warn_from("torch.nn.modules.linear")
    warn_from("longshore.ops.ssd", "mkldnn bf16 path needs a cpu with bf16 support")


def test_skipped_tests_are_listed_by_reason():
    def report(path, reason):
        return SimpleNamespace(longrepr=(path, 3, f"Skipped: {reason}"))

    reports = [report("a.py", "no GPU"), report("b.py", "slow"), report("c.py", "no GPU")]
    assert skipped_lines(reports) == ["   2 no GPU (a.py, c.py)", "   1 slow (b.py)"]


@pytest.mark.parametrize(
    ("path", "quick", "rest"),
    [
        ("plan/test_order.py", True, False),
        ("plan/test_brute_force.py", True, True),  # some of its tests are slow
        ("ranks/test_step.py", False, True),
        ("end_to_end", False, True),
        ("plan", True, True),
    ],
)
def test_each_part_imports_only_its_own_files(path, quick, rest):
    for part, is_wanted in (("quick", quick), ("rest", rest)):
        config = SimpleNamespace(getoption={"part": part}.get)
        assert (pytest_ignore_collect(HERE / path, config) is None) == is_wanted, part


def test_slow_tests_and_those_on_ranks_are_not_quick():
    def item(path, *marks):
        return SimpleNamespace(path=HERE / path, get_closest_marker=dict.fromkeys(marks, 1).get)

    assert is_quick(item("plan/test_order.py"))
    assert not is_quick(item("plan/test_order.py", "slow"))
    assert not is_quick(item("ranks/test_step.py"))


@pytest.mark.usefixtures("half_by_float32")
def test_half_precision_is_multiplied_in_float32():
    linear = torch.nn.Linear(3, 2).bfloat16()
    x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    out = linear(x)
    out.sum().backward()
    want = x.float() @ linear.weight.float().T + linear.bias.float()
    assert out.dtype == x.grad.dtype == torch.bfloat16
    assert torch.equal(out, want.bfloat16())
