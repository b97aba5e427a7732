"""What feed-forward parts do between their products: SwiGLU and relu2; and sigmoid gates.

In: gate and up (…, F), which may be halves of one tensor. Out: (…, F). For backward only the inputs
are kept.

    clipped(9, −9, 7) = 7, −7            clipped(−9, 3, 7) = −9, 3
    swiglu(1, 2) = silu(1)·2 = 1.462     relu2(−1) = 0, relu2(3) = 9     sigmoid_gate(3, 0) = 1.5

`gated_linear` multiplies the result with a weight (C, F) as well: where kernels run, the
(T, F) product between is computed again in backward and never kept.
"""

from torch import Tensor
from torch.nn import functional

from longshore.ops.backends import pick


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    kernels = pick("gate", gate, up)
    if kernels is not None:
        output: Tensor = kernels.gated("silu", gate, up)
        return output
    return functional.silu(gate) * up


def clipped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The gate up to `limit`, and up between −limit and limit; in plain torch."""
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def relu2(up: Tensor) -> Tensor:
    """relu(up)²."""
    kernels = pick("gate", up)
    if kernels is not None:
        output: Tensor = kernels.gated("relu2", None, up)
        return output
    return functional.relu(up).square()


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate)."""
    kernels = pick("gate", gate, x)
    if kernels is not None:
        output: Tensor = kernels.gated("sigmoid", gate, x)
        return output
    return x * gate.sigmoid()


def gated_linear(gate_TF: Tensor | None, up_TF: Tensor, weight_CF: Tensor) -> Tensor:
    """(T, C): swiglu(gate, up), or relu2(up) without a gate, times the weight."""
    kernels = pick("gate", *(x for x in (gate_TF, up_TF, weight_CF) if x is not None))
    if kernels is not None:
        output_TC: Tensor = kernels.gated_linear(gate_TF, up_TF, weight_CF)
        return output_TC
    inner_TF = relu2(up_TF) if gate_TF is None else swiglu(gate_TF, up_TF)
    return functional.linear(inner_TF, weight_CF)
