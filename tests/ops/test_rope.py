import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.ops import reference
from longshore.ops.pointwise import rotate


def inputs(tokens, heads, width, turned):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, heads, width, dtype=torch.float64, generator=draw).requires_grad_()
    angles = 9 * torch.randn(tokens, turned, dtype=torch.float64, generator=draw)
    return x, angles.cos(), angles.sin()


def test_by_hand():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    assert rotate(x, cos, sin).tolist() == [[[-3, 2, 1, 4, 5]]]


@pytest.mark.property
@given(
    tokens=st.integers(0, 5),
    heads=st.integers(1, 3),
    turned=st.integers(0, 4),
    rest=st.integers(0, 3),
)
def test_as_the_twin(tokens, heads, turned, rest):
    x, cos, sin = inputs(tokens, heads, 2 * turned + rest, turned)
    got, want = rotate(x, cos, sin), reference.rotate(x, cos, sin)
    assert got.shape == x.shape
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    grad = torch.randn_like(got)
    (got_x,), (want_x,) = (torch.autograd.grad(y, x, grad) for y in (got, want))
    torch.testing.assert_close(got_x, want_x, rtol=0, atol=1e-14)
    assert torch.equal(got[..., 2 * turned :], x[..., 2 * turned :])


def test_products_depend_on_the_distance_alone():
    x, _, _ = inputs(1, 1, 6, 0)
    angle = torch.tensor([[0.1, 0.7, 2.0]], dtype=torch.float64)

    def product(p, q):
        turned = [rotate(x, (n * angle).cos(), (n * angle).sin()) for n in (p, q)]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(5, 3), product(102, 100))
    assert (product(5, 3) - product(5, 2)).abs() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_turns_in_float32(dtype):
    x, cos, sin = inputs(4, 2, 8, 3)
    low = x.detach().to(dtype)
    got = rotate(low, cos.float(), sin.float())
    assert got.dtype == dtype
    assert torch.equal(got, rotate(low.float(), cos.float(), sin.float()).to(dtype))


def test_float64_stays_float64_and_tables_may_be_coarser():
    x, cos, sin = inputs(4, 2, 8, 3)
    got = rotate(x, cos.float(), sin.float())
    assert got.dtype == torch.float64
    assert torch.equal(got, rotate(x, cos.float().double(), sin.float().double()))


@pytest.mark.parametrize(
    ("table", "other"), [((3, 2), (3, 2)), ((4, 2), (4, 1)), ((4, 4), (4, 4)), ((4,), (4,))]
)
def test_tables_that_do_not_fit_are_refused(table, other):
    with pytest.raises(ValueError, match="need x's 4 rows and at most 3 columns"):
        rotate(torch.zeros(4, 1, 7), torch.zeros(table), torch.zeros(other))
