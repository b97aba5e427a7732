"""The Triton kernels of gated norms, on a GPU or interpreted, against plain torch in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from longshore.ops import backends
from longshore.ops.pointwise import norm_after_gate, norm_before_gate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    torch.manual_seed(0)
    plain_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain_empty(*a, **k).fill_(torch.nan))


def results(norm, tensors, grad, **settings):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = norm(*leaves, eps=1e-5, **settings)
    grads = torch.autograd.grad(out, leaves, grad)
    return [x.detach().cpu().double() for x in (out, *grads)]


def check(norm, tensors, tolerance, **settings):
    grad = torch.randn(tensors[0].shape).to(tensors[0].dtype)
    values = results(norm, [x.to(DEVICE) for x in tensors], grad.to(DEVICE), **settings)
    assert backends.chosen()["gated norm"] == "triton"
    want = results(norm, [x.double() for x in tensors], grad.double(), **settings)
    for value, exact in zip(values, want, strict=True):
        assert value.shape == exact.shape
        assert (value - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("rows", "groups", "width"), [(1, 1, 6), (5, 3, 20), (67, 2, 130)])
def test_norm_after_gate(rows, groups, width, dtype, tolerance):
    wide = torch.randn(rows, 2 * groups * width + 3).to(dtype)
    x, gate = wide[:, : groups * width], wide[:, 3 + groups * width :]
    check(norm_after_gate, [x, gate, torch.randn(groups * width)], tolerance, groups=groups)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 6), (5, 3, 20), (130, 2, 33)])
def test_norm_before_gate(rows, heads, width, dtype, tolerance):
    x = torch.randn(rows, heads, width).to(dtype)
    gate = torch.randn(rows, heads, 2 * width + 1).to(dtype)[..., width + 1 :]
    check(norm_before_gate, [x, gate, torch.randn(width)], tolerance)


def test_rows_of_other_shapes():
    for shape in ((6,), (4, 6), (2, 2, 3, 6)):
        tensors = [torch.randn(shape), torch.randn(shape), torch.randn(6)]
        check(norm_before_gate, tensors, 1e-5)
        check(norm_after_gate, tensors, 1e-5, groups=2)


def test_a_poisoned_row_stays_alone():
    x, gate = (torch.randn(40, 2, 8, device=DEVICE) for _ in range(2))
    weight, grad = torch.randn(8, device=DEVICE), torch.randn(40, 2, 8, device=DEVICE)
    clean = results(norm_before_gate, [x, gate, weight], grad)
    x[7] = torch.nan
    other = results(norm_before_gate, [x, gate, weight], grad)
    kept = [t for t in range(40) if t != 7]
    for a, b in zip(clean[:3], other[:3], strict=True):
        assert torch.equal(a[kept], b[kept])
