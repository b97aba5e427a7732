"""Linear layers that read the same input, as one node of autograd.

In: x (T, C) and nn.Linear modules. Out: for each its product (T, F). For q, k and v, with gradients
g of the outputs and weights w (F, C), backward runs

    dx = g_q @ w_q,  dx += g_k @ w_k,  dx += g_v @ w_v         inside the products: nothing to add

where three nodes would write three gradients of x and add them up. Elsewhere, and for modules that
something else is attached to, each module is called by itself. Low-rank factors are added after.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from longshore.ops.backends import pick
from longshore.ops.low_rank import AdaptedLinear


def projected(x_TC: Tensor, linears: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
    """linear(x) of each of them."""
    weights = [linear.weight for linear in linears]
    picked = pick("projections", x_TC, *weights)
    if picked is None or x_TC.dim() != 2 or not all(map(_is_bare, linears)):
        return tuple(linear(x_TC) for linear in linears)
    biases = [linear.bias for linear in linears]
    outputs: tuple[Tensor, ...] = _Projections.apply(x_TC, *weights, *biases)  # type: ignore[no-untyped-call]
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
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ANN401
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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
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
