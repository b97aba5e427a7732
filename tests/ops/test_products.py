import pytest
import torch
from tests.ops.twins import assert_same, bounds_of, gated_delta_rule, run
from torch.utils._python_dispatch import TorchDispatchMode

from longshore.ops.attention import attention
from longshore.ops.linear import product, solve_unit_lower
from longshore.ops.ssd import ssd


def matrices(*shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return {f"x{i}": torch.randn(shape, dtype=dtype) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_and_its_gradients(turned):
    shapes = [(2, 3, 5, 4), (2, 3, 4, 6)]
    given = matrices(
        *((*s[:2], s[3], s[2]) if t else s for s, t in zip(shapes, turned, strict=True))
    )

    def by(multiply):
        return lambda x0, x1: multiply(
            *(x.mT if t else x for x, t in zip((x0, x1), turned, strict=True))
        )

    assert_same(run(by(product), given), run(by(torch.matmul), given), within=1e-14)


def test_a_solution_and_its_gradients():
    given = matrices((3, 2, 5, 5), (3, 2, 5, 4))

    def written_out(x0, x1):
        return (torch.eye(5, dtype=x0.dtype) + x0.tril(-1)).inverse() @ x1

    got = run(lambda x0, x1: solve_unit_lower(x0.tril(-1), x1), given)
    assert_same(got, run(written_out, given), within=1e-12)


class RightSides(TorchDispatchMode):
    """Notes of every product whose right side is transposed in memory."""

    def __init__(self):
        super().__init__()
        self.products, self.turned = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.products += 1
            if args[1].stride(-1) != 1 and args[1].numel():
                self.turned.append(tuple(args[1].shape))
        return function(*args, **(kwargs or {}))


def heads(*shape):
    return torch.randn(70, *shape).requires_grad_()


@pytest.mark.parametrize(
    "make",
    [
        lambda b: attention(heads(4, 8), heads(2, 8), heads(2, 8), bounds=b),
        lambda b: gated_delta_rule(
            heads(4, 8), heads(4, 8), heads(4, 6), heads(4), heads(4), bounds=b
        )[0],
        lambda b: ssd(heads(4, 6), heads(4), -torch.ones(4), heads(2, 8), heads(2, 8), bounds=b)[0],
    ],
    ids=["attention", "delta_rule", "ssd"],
)
def test_no_right_side_is_transposed_in_memory(make):
    """Nor in backward: on aarch64 torch takes 0.6 ms for each matrix that is."""
    with RightSides() as noted:
        make(bounds_of([5, 40, 25])).square().sum().backward()
    assert noted.products > 4
    assert noted.turned == []
