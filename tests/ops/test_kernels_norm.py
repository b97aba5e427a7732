"""Norm kernels, on CUDA or in Triton's interpreter, against plain torch in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from longshore.ops import backends
from longshore.ops.pointwise import add_norm, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)


def normal(*shape, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(DEVICE, dtype)


def gradients(function, leaves, seeds=(7, 8)):
    leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = [
        normal(*out.shape, seed=seed).to(out.dtype) for out, seed in zip(outs, seeds, strict=False)
    ]
    torch.autograd.backward(outs, grads)
    return [*outs, *(x.grad for x in leaves if x is not None)]


def assert_as_float64(function, leaves, within):
    assert backends.pick("norm", leaves[0], leaves[-1]) is not None
    wide = [None if x is None else x.double() for x in leaves]
    for out, want in zip(gradients(function, leaves), gradients(function, wide), strict=True):
        assert out.isfinite().all()
        assert (out.double() - want).abs().max() <= within * want.abs().max()


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (1, 7), (37, 24), (9, 1030)])
def test_the_norm_alone(rows, width, zero_centred):
    def norm(x, weight):
        return rms_norm(x, weight, 1e-5, zero_centred=zero_centred)

    assert_as_float64(norm, [normal(rows, width), normal(width, seed=1)], 1e-5)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (700, 24), (9, 1030)])
def test_with_the_sum(rows, width, adds, zero_centred):
    def both(x, delta, weight):
        return add_norm(x, delta, weight, 1e-5, zero_centred=zero_centred)

    delta = normal(rows, width, seed=2) if adds else None
    assert_as_float64(both, [normal(rows, width), delta, normal(width, seed=1)], 1e-5)


def test_a_wide_residual():
    x, delta = normal(5, 40), normal(5, 40, dtype=torch.bfloat16, seed=2)
    weight = normal(40, dtype=torch.bfloat16, seed=1)

    def both(x, delta, weight):
        return add_norm(x, delta, weight, 1e-5)

    results = gradients(both, [x, delta, weight])
    total, normed, dx, ddelta, dweight = results
    assert total.dtype == dx.dtype == torch.float32
    assert normed.dtype == ddelta.dtype == dweight.dtype == torch.bfloat16
    # Triton's interpreter cuts bfloat16 off where a GPU rounds.
    assert ((dx - ddelta.float()).abs() <= 2**-7 * dx.abs()).all()
    assert_as_float64(both, [x, delta, weight], 2**-7)


def test_rows_of_a_view_and_rows_of_zeros_without_eps_beside_them():
    wide = normal(6, 3, 22)

    def norm(x, weight):
        return rms_norm(x[..., 4:15], weight, 0.0)

    assert_as_float64(norm, [wide, normal(11, seed=1)], 1e-5)


def test_garbage_stays_in_its_row():
    x, weight = normal(5, 8), normal(8, seed=1)
    clean = rms_norm(x, weight, 1e-5)
    x[3] = torch.nan
    x.requires_grad_()
    out = rms_norm(x, weight, 1e-5)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    others = [0, 1, 2, 4]
    assert torch.equal(out[others], clean[others])
    assert dx[others].isfinite().all()


def test_a_gradient_of_the_sum_alone():
    x, delta = normal(3, 8).requires_grad_(), normal(3, 8, seed=1).requires_grad_()
    total, _ = add_norm(x, delta, normal(8), 1e-5)
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(delta.grad, torch.ones_like(x))


@pytest.mark.parametrize("x", [normal(2, 8200), normal(0, 8), normal(2, 8).double()])
def test_the_rest_is_for_plain_torch(x):
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=DEVICE)
    assert backends.pick("norm", x, weight) is None
    assert rms_norm(x, weight, 1e-5).shape == x.shape


@pytest.mark.parametrize(("rows", "middle"), [(1, None), (300, None), (2, 1), (300, 131)])
def test_sums_of_columns(rows, middle):
    from longshore.ops.kernels.norm import column_sums

    partial = normal(rows, 70)
    groups = partial.double().split([rows] if middle is None else [middle, rows - middle])
    for total, group in zip(
        column_sums(partial, torch.float32, middle=middle), groups, strict=True
    ):
        torch.testing.assert_close(total.double(), group.sum(0), rtol=0, atol=1e-4)


def test_a_frozen_weight():
    x, weight = normal(3, 8).requires_grad_(), normal(8, seed=1)
    rms_norm(x, weight, 1e-5).sum().backward()
    frozen = x.grad
    x.grad = None
    rms_norm(x, weight.requires_grad_(), 1e-5).sum().backward()
    assert torch.equal(x.grad, frozen)


@pytest.mark.parametrize("function", [rms_norm, lambda x, *rest: add_norm(x, x, *rest)])
def test_a_weight_with_strides(function):
    """Columns of a larger tensor, and one number for all."""
    for weight in (normal(24, 3)[:, 1], normal(1).expand(24)):
        assert_as_float64(
            lambda x, weight: function(x, weight, 1e-5), [normal(5, 24), weight], 1e-5
        )
