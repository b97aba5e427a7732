"""Rotary kernels, on CUDA or in Triton's interpreter, against plain torch in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from longshore.ops import backends
from longshore.ops.pointwise import norm_rotate, norm_rotate_both, rotate, rotate_both

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


def both_gradients(function, leaves, seeds=(7, 8)):
    leaves = [x.detach().requires_grad_() for x in leaves]
    outs = function(*leaves)
    # Heads before tokens, so that the gradients have strides.
    grads = [
        normal(out.shape[1], out.shape[0], out.shape[2], seed=seed).to(out.dtype).transpose(0, 1)
        for out, seed in zip(outs, seeds, strict=True)
    ]
    torch.autograd.backward(outs, grads)
    return [*outs, *(x.grad for x in leaves)]


def assert_both_as_float64(function, leaves, within=1e-5):
    wide = [x.double() for x in leaves]
    results = both_gradients(function, leaves), both_gradients(function, wide)
    for out, want in zip(*results, strict=True):
        assert out.isfinite().all()
        assert (out.double() - want).abs().max() <= within * want.abs().max()


BOTH = [(1, 1, 1, 2, 1), (5, 3, 1, 7, 2), (40, 2, 4, 16, 8), (300, 6, 2, 8, 2)]


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "width", "half"), BOTH)
def test_queries_and_keys_at_once(tokens, heads, kv_heads, width, half):
    cos, sin = tables(tokens, half)
    q, k = normal(tokens, heads, width), normal(tokens, kv_heads, width, seed=1)
    assert_both_as_float64(lambda q, k: rotate_both(q, k, cos, sin), [q, k])
    weights = [normal(width, seed=2), normal(width, seed=4)]
    for zero_centred in (False, True):
        assert_both_as_float64(
            lambda q, k, *w, centred=zero_centred: norm_rotate_both(
                q, k, w, 1e-5, cos, sin, zero_centred=centred
            ),
            [q, k, *weights],
        )


def test_at_once_is_bitwise_one_after_the_other_but_for_the_weights():
    cos, sin = tables(5, 2)
    q, k, weights = normal(5, 3, 7), normal(5, 2, 7, seed=1), (normal(7, seed=2), normal(7, seed=4))
    at_once = norm_rotate_both(q, k, weights, 1e-5, cos, sin)
    alone = [norm_rotate(x, w, 1e-5, cos, sin) for x, w in zip((q, k), weights, strict=True)]
    assert all(map(torch.equal, at_once, alone))


def test_both_as_views_and_in_half_precision():
    cos, sin = tables(5, 2)

    def both(joined, *weights):
        q, k, _ = joined.split([3, 2, 1], dim=1)
        return norm_rotate_both(q, k, weights, 1e-5, cos, sin)

    joined, weights = normal(5, 6, 7), [normal(7, seed=1), normal(7, seed=2)]
    assert_both_as_float64(both, [joined, *weights])
    half = [x.bfloat16() for x in (joined, *weights)]
    assert_both_as_float64(both, half, 2**-6)


def test_keys_without_a_gradient_and_frozen_weights():
    cos, sin = tables(5, 2)
    q, k = normal(5, 3, 7).requires_grad_(), normal(5, 2, 7, seed=1).requires_grad_()
    weights = normal(7, seed=2), normal(7, seed=4)
    q_out, _ = norm_rotate_both(q, k, weights, 1e-5, cos, sin)
    q_out.sum().backward()
    alone = q.detach().requires_grad_()
    norm_rotate(alone, weights[0], 1e-5, cos, sin).sum().backward()
    assert torch.equal(q.grad, alone.grad)
    assert not k.grad.any()


def test_widths_that_differ_are_rotated_one_after_the_other():
    cos, sin = tables(5, 2)
    q, k = normal(5, 3, 7), normal(5, 2, 6, seed=1)
    q_out, k_out = rotate_both(q, k, cos, sin)
    assert torch.equal(q_out, rotate(q, cos, sin))
    assert torch.equal(k_out, rotate(k, cos, sin))


def test_weights_with_strides():
    cos, sin = tables(5, 2)
    weights = normal(8, 3, seed=1)[:, 1], normal(1, seed=2).expand(8)

    def both(q, k, *weights):
        return norm_rotate_both(q, k, weights, 1e-5, cos, sin)

    assert_both_as_float64(both, [normal(5, 3, 8), normal(5, 2, 8, seed=4), *weights])
