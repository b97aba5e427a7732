"""Gate kernels, on CUDA or in Triton's interpreter, against plain torch in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from longshore.ops import backends
from longshore.ops.pointwise import gated_linear, relu2, sigmoid_gate, swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)


def normal(*shape, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=draw)).to(DEVICE, dtype)


def gradients(function, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    out.backward(normal(*out.shape, seed=7).to(out.dtype))
    return [out, *(x.grad for x in leaves)]


def assert_as_float64(function, leaves, within=1e-5):
    assert backends.pick("gate", *leaves) is not None
    wide = [x.double() for x in leaves]
    for out, want in zip(gradients(function, leaves), gradients(function, wide), strict=True):
        assert (out.double() - want).abs().max() <= within * want.abs().max()


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 1030), (2, 3, 6)])
def test_each_gate(shape):
    gate, up = normal(*shape), normal(*shape, seed=1)
    assert_as_float64(swiglu, [gate, up])
    assert_as_float64(sigmoid_gate, [up, gate])
    assert_as_float64(relu2, [up])


def test_half_precision():
    gate, up = (normal(5, 40, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    assert_as_float64(swiglu, [gate, up], 2**-7)


def test_halves_of_one_tensor():
    assert_as_float64(lambda both: swiglu(*both.chunk(2, dim=-1)), [normal(5, 22)])


def test_large_gates():
    gate = torch.tensor([[-200.0, 200.0, -1e30]], device=DEVICE).requires_grad_()
    up = torch.ones(1, 3, device=DEVICE)
    out = swiglu(gate, up)
    out.sum().backward()
    assert out.tolist() == [[0, 200, 0]]
    assert gate.grad.tolist() == [[0, 1, 0]]


def test_with_the_product():
    gate, up, weight = normal(5, 7), normal(5, 7, seed=1), normal(3, 7, seed=2)
    assert_as_float64(gated_linear, [gate, up, weight])
    assert_as_float64(lambda up, weight: gated_linear(None, up, weight), [up, weight])


def test_the_product_keeps_its_inputs_alone():
    leaves = [normal(5, 7), normal(5, 7, seed=1), normal(3, 7, seed=2)]
    kept = []
    leaves = [x.requires_grad_() for x in leaves]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = gated_linear(*leaves)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in leaves}
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for again, grad in zip(torch.autograd.grad(out.sum(), leaves), first, strict=True):
        assert torch.equal(again, grad)


def test_a_frozen_weight():
    gate, up = normal(5, 7).requires_grad_(), normal(5, 7, seed=1)
    gated_linear(gate, up, normal(3, 7, seed=2)).sum().backward()
    assert gate.grad.isfinite().all()


def test_garbage_stays_in_its_row():
    gate, up = normal(3, 5), normal(3, 5, seed=1)
    clean = swiglu(gate, up)
    up[1] = torch.nan
    assert torch.equal(swiglu(gate, up)[[0, 2]], clean[[0, 2]])
    assert relu2(up)[1].isnan().all()
