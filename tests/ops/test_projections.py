"""Linear layers of one input, as one node against each by itself."""

import pytest
import torch
from torch import nn

from longshore.ops import backends
from longshore.ops.linear import projected


def layers(*widths, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    return tuple(nn.Linear(6, width, bias=bias, dtype=dtype) for width in widths)


def inputs(rows=5):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))


def results(x, linears, used=None):
    x = x.detach().requires_grad_()
    outputs = projected(x, linears)
    for linear in linears:
        linear.zero_grad()
    used = range(len(outputs)) if used is None else used
    sum((outputs[place] * outputs[place].detach().cos()).sum() for place in used).backward()
    parameters = [p for linear in linears for p in linear.parameters()]
    return [*outputs, x.grad, *(p.grad for p in parameters)]


def assert_alike(ours, plain):
    for out, want in zip(ours, plain, strict=True):
        assert (out is None) == (want is None)
        if out is not None:
            torch.testing.assert_close(out, want)


@pytest.fixture
def both(monkeypatch):
    def compare(x, linears, used=None):
        with monkeypatch.context() as patch:
            patch.setattr(backends, "_interpreted", lambda: True)
            ours = results(x, linears, used)
        assert backends.chosen()["projections"] == "torch in one node"
        plain = results(x, linears, used)
        assert backends.chosen()["projections"].startswith("plain torch")
        assert_alike(ours, plain)

    return compare


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_outputs_and_all_gradients(both, rows, bias):
    both(inputs(rows), layers(4, 3, 1, bias=bias))


def test_frozen_weights_get_no_gradient(both):
    linears = layers(4, 3, bias=True)
    linears[0].weight.requires_grad_(False)
    linears[1].bias.requires_grad_(False)
    both(inputs(), linears)


def test_an_output_without_gradient(both):
    both(inputs(), layers(4, 3), used=[1])


def test_an_input_without_gradient(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    linears = layers(4, 3)
    first, second = projected(inputs(), linears)
    (first.sum() + second.sum()).backward()
    assert all(linear.weight.grad is not None for linear in linears)


def test_nothing_is_added_in_backward(monkeypatch):
    """The sums over the layers are inside of the products."""
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    x = inputs().requires_grad_()
    with torch.profiler.profile() as profile:
        torch.autograd.backward(
            projected(x, layers(4, 3, 1)), [torch.ones(5, n) for n in (4, 3, 1)]
        )
    names = [event.name for event in profile.events()]
    assert names.count("aten::addmm_") == 2
    assert "aten::add" not in names
    assert "aten::add_" not in names


def test_modules_with_hooks_are_called(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    linears = layers(4, 3)
    calls = []
    linears[1].register_forward_hook(lambda *call: calls.append(call))
    projected(inputs(), linears)
    assert len(calls) == 1


def test_plain_torch_is_bitwise_each_layer_by_itself():
    linears, x = layers(4, 3), inputs()
    assert all(map(torch.equal, projected(x, linears), (linear(x) for linear in linears)))
