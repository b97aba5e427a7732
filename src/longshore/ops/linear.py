"""Linear layers that share an input, low-rank factors beside a weight (LoRA), small products.

`projected`: x (T, C) and nn.Linear modules to each module's product (T, F), as one node of
autograd. For q, k and v, with gradients g of the outputs and weights w (F, C), backward runs

    dx = g_q @ w_q,  dx += g_k @ w_k,  dx += g_v @ w_v         inside the products: nothing to add

where three nodes would write three gradients of x and add them up.

`adapt` puts factors beside a weight, which keeps its name and its place:

    adapt(linear, LowRank(4, 3, rank=2, scale=2.0))     linear.lora.a (2, 4), linear.lora.b (3, 2)
    linear(x)                                           x·Wᵀ + bias + 2·(x·Aᵀ)·Bᵀ; at first B is 0

`product` and `solve_unit_lower` are batched, (…, n, k) by (…, k, m). On the CPU torch hands a
product whose right side is transposed in memory, matrix after matrix, to oneDNN, which on aarch64
is slow for small ones: 104 products of 64×16 by 16×64 took 7 ms on a Neoverse N1, and 2 ms with the
right side copied row by row. Autograd's own backward of a @ b has such a product, so it is written
out here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from longshore.ops.backends import pick


class LowRank(nn.Module):
    """a: (R, C). b: (F, R), first 0."""

    def __init__(self, inputs: int, outputs: int, *, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.normal_(self.a, std=(3 * inputs) ** -0.5)

    def forward(self, base: Tensor, x: Tensor) -> Tensor:
        """base: what the weight makes of x."""
        return self.onto(base, functional.linear(x, self.a))

    def onto(self, base: Tensor, inner: Tensor) -> Tensor:
        """inner: (…, R), what a makes of the input."""
        inner = inner * self.scale
        if base.dim() == 2:
            return torch.addmm(base, inner, self.b.t())
        return base + functional.linear(inner, self.b)

    def product(self) -> Tensor:
        """scale · B·A: (F, C)."""
        return (self.b * self.scale) @ self.a


class AdaptedLinear(nn.Linear):
    """lora: the factors."""

    lora: LowRank

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(super().forward(x), x)


def whole_weight(linear: nn.Linear) -> Tensor:
    """The weight, with its factors' product where it has some."""
    lora = getattr(linear, "lora", None)
    if not isinstance(lora, LowRank):
        return linear.weight
    return linear.weight + lora.product()


def adapt(linear: nn.Linear, lora: LowRank, kind: type[nn.Linear] = AdaptedLinear) -> None:
    """Puts factors beside the weight, in place; kind: the class whose forward uses them."""
    linear.lora = lora
    linear.__class__ = kind


def projected(x_TC: Tensor, linears: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
    """linear(x) of each of them; a module with hooks is called by itself."""
    weights = [linear.weight for linear in linears]
    is_plain = x_TC.dim() != 2 or not all(map(_is_bare, linears))
    if is_plain or pick("projections", x_TC, *weights) is None:
        return tuple(linear(x_TC) for linear in linears)
    biases = [linear.bias for linear in linears]
    outputs: tuple[Tensor, ...] = _Projections.apply(x_TC, *weights, *biases)
    return tuple(
        linear.lora(output, x_TC) if isinstance(linear, AdaptedLinear) else output
        for linear, output in zip(linears, outputs, strict=True)
    )


def _is_bare(linear: nn.Linear) -> bool:
    """No unknown subclass, and no hooks, which only a call of the module would run."""
    hooks = linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) in (nn.Linear, AdaptedLinear) and not (
        hooks or linear._backward_hooks or linear._backward_pre_hooks
    )


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        """parameters: all weights, then as many biases."""
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        return tuple(
            functional.linear(x, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
            if weight is not None
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        dx: Tensor | None = None
        dweights: list[Tensor | None] = [None] * len(weights)
        dbiases: list[Tensor | None] = [None] * len(weights)
        for place, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            if grad is None:
                continue
            if wants_x:
                dx = grad @ weight if dx is None else dx.addmm_(grad, weight)
            if wants[place]:
                dweights[place] = grad.t() @ x
            if wants[len(weights) + place]:
                dbiases[place] = grad.sum(0)
        return dx, *dweights, *dbiases


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for operands with the same leading dims."""
    if a.device.type != "cpu":
        return a @ b
    return _Product.apply(a, b)


def by_rows(x: Tensor) -> Tensor:
    """x, on the CPU copied if its rows are not contiguous."""
    return x if x.device.type != "cpu" or x.stride(-1) == 1 else x.contiguous()


def solve_unit_lower(system: Tensor, right: Tensor) -> Tensor:
    """x of (1 + system)·x = right, for a system that is 0 on and above its diagonal."""
    if system.device.type != "cpu":
        return _solve(system, right)
    return _Solution.apply(system, right)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ by_rows(b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        grad = by_rows(grad)
        return grad @ by_rows(b.mT) if needs_a else None, a.mT @ grad if needs_b else None


class _Solution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: Tensor, right: Tensor) -> Tensor:
        solution = _solve(system, right)
        ctx.save_for_backward(system, solution)
        return solution

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        system, solution = ctx.saved_tensors
        d_right = torch.linalg.solve_triangular(system.mT, grad, upper=True, unitriangular=True)
        return -(by_rows(d_right) @ by_rows(solution.mT)).tril(-1), d_right


def _solve(system: Tensor, right: Tensor) -> Tensor:
    # The ones of the diagonal are implied.
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
