"""Rotary kernels, on CUDA or in Triton's interpreter, against plain torch in float64."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs Triton")

from longshore.ops import backends
from longshore.ops.rope import norm_rotate, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)


def normal(*shape, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(DEVICE, dtype)


def gradients(function, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    # Heads before tokens, so that the gradient has strides.
    grad = normal(out.shape[1], out.shape[0], out.shape[2], seed=7).to(out.dtype)
    out.backward(grad.transpose(0, 1))
    return [out, *(x.grad for x in leaves)]


def assert_as_float64(function, leaves, within=1e-5):
    wide = [x.double() for x in leaves]
    for out, want in zip(gradients(function, leaves), gradients(function, wide), strict=True):
        assert out.isfinite().all()
        assert (out.double() - want).abs().max() <= within * want.abs().max()


def tables(tokens, half):
    angles = 9 * normal(tokens, half, seed=3)
    assert backends.pick("rope", normal(1, 1, 1), angles) is not None
    return angles.cos(), angles.sin()


SHAPES = [(1, 1, 2, 1), (5, 3, 7, 2), (40, 2, 16, 8), (3, 3, 13, 6)]


@pytest.mark.parametrize(("tokens", "heads", "width", "half"), SHAPES)
def test_a_rotation(tokens, heads, width, half):
    cos, sin = tables(tokens, half)
    for start in {0, 1, width - 2 * half} & set(range(width - 2 * half + 1)):
        assert_as_float64(
            lambda x, start=start: rotate(x, cos, sin, start=start), [normal(tokens, heads, width)]
        )


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "width", "half"), [*SHAPES, (300, 3, 8, 2)])
def test_a_norm_before_it(tokens, heads, width, half, zero_centred):
    cos, sin = tables(tokens, half)

    def both(x, weight):
        return norm_rotate(x, weight, 1e-5, cos, sin, zero_centred=zero_centred)

    assert_as_float64(both, [normal(tokens, heads, width), normal(width, seed=1)])


def test_a_view_and_half_precision():
    cos, sin = tables(5, 2)

    def both(joined, weight):
        x, _ = joined.chunk(2, dim=-1)
        return norm_rotate(x, weight, 1e-5, cos, sin)

    joined, weight = normal(5, 3, 14), normal(7, seed=1)
    assert_as_float64(both, [joined, weight])
    assert_as_float64(both, [joined.bfloat16(), weight.bfloat16()], 2**-6)


def test_garbage_stays_in_its_row():
    cos, sin = tables(3, 2)
    x, weight = normal(3, 2, 6), normal(6, seed=1)
    clean = norm_rotate(x, weight, 1e-5, cos, sin)
    x[1] = torch.nan
    assert torch.equal(norm_rotate(x, weight, 1e-5, cos, sin)[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("half", [0, 2])
def test_no_rows_or_no_columns_are_for_plain_torch(half):
    x = normal(0 if half else 2, 1, 4)
    table = torch.ones(len(x), half, device=DEVICE)
    assert backends.pick("rope", x, table) is None
    assert rotate(x, table, table).shape == x.shape
