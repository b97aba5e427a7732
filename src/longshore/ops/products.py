"""Batched products of small matrices, in a memory layout that is fast on every CPU.

In: (…, n, k) and (…, k, m). Out: (…, n, m), differentiable once. On the CPU torch hands a product
whose right side is transposed in memory, matrix after matrix, to oneDNN, which on aarch64 is slow
for small ones: 104 products of 64×16 by 16×64 took 7 ms on a Neoverse N1, and 2 ms with the right
side copied row by row. Autograd's own backward of a @ b has such a product, so it is written out
here:

    product(a, b) = a·b        its gradients: grad·bᵀ with bᵀ copied, and aᵀ·grad

On other devices it is a @ b.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for operands with the same leading dims."""
    if a.device.type != "cpu":
        return a @ b
    result: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return result


def by_rows(x: Tensor) -> Tensor:
    """x, on the CPU copied if its rows are not contiguous."""
    return x if x.device.type != "cpu" or x.stride(-1) == 1 else x.contiguous()


def solve_unit_lower(system: Tensor, right: Tensor) -> Tensor:
    """x of (1 + system)·x = right, for a system that is 0 on and above its diagonal."""
    if system.device.type != "cpu":
        return _solve(system, right)
    result: Tensor = _Solution.apply(system, right)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(a, b)
        return a @ by_rows(b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        grad = by_rows(grad)
        return grad @ by_rows(b.mT) if needs_a else None, a.mT @ grad if needs_b else None


class _Solution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: Tensor, right: Tensor) -> Tensor:  # noqa: ANN401
        solution = _solve(system, right)
        ctx.save_for_backward(system, solution)
        return solution

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        system, solution = ctx.saved_tensors
        d_right = torch.linalg.solve_triangular(system.mT, grad, upper=True, unitriangular=True)
        return -(by_rows(d_right) @ by_rows(solution.mT)).tril(-1), d_right


def _solve(system: Tensor, right: Tensor) -> Tensor:
    # The ones of the diagonal are implied.
    solution: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return solution
