"""What `longshore doctor` tries of each op: tiny inputs, the op, and what it should give.

In: nothing. Out: OpProbe, one for each op. Its inputs are those of sequences of 1, 5 and 10 tokens;
float64 ones become the dtype that training uses, float32 ones stay. Widths are multiples of 16, so
that kernels take them. Norm, with x, what is added, and the weight:

    probe.run(bounds, x, delta, weight)                 x + delta, and its norm
    probe.reference(bounds, x, delta, weight)           the same in float64 on the CPU

T rows, H heads, D and V width of keys and values, C channels, E experts, K experts of a token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import silu

from longshore.batch import Boundaries
from longshore.ops import attention, conv, cross_entropy, delta_rule, experts, rope, ssd
from longshore.ops import pointwise as gate
from longshore.ops import pointwise as gated_norm
from longshore.ops import pointwise as norm
from longshore.ops import reference as exact_attention
from longshore.ops import reference as exact_conv
from longshore.ops import reference as exact_cross_entropy
from longshore.ops import reference as exact_delta_rule
from longshore.ops import reference as exact_experts
from longshore.ops import reference as exact_rope
from longshore.ops import reference as exact_ssd

LENGTHS = (1, 5, 10)
ROWS = sum(LENGTHS)
CHANNELS = 32
VOCABULARY = 48
EPS = 1e-6

Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OpProbe:
    """One op, to be tried."""

    name: str
    """For people."""
    op: str
    """Its name in ops/backends.py."""
    inputs: tuple[Tensor, ...]
    """What has gradients; float64 for the dtype of training, or float32."""
    run: Callable[..., Results]
    """The public function, of boundaries and the inputs."""
    reference: Callable[..., Results]
    """The same, slow and obvious."""


def bounds_on(device: torch.device) -> Boundaries:
    offsets = tuple(accumulate(LENGTHS, initial=0))
    numbers = torch.tensor(offsets, dtype=torch.int32, device=device)
    return Boundaries(offsets, numbers, max(LENGTHS))


def op_probes() -> Iterator[OpProbe]:
    yield _attention("attention", 128, 128)
    yield _attention("attention of MLA", 192, 128)
    yield _loss()
    yield _norm()
    yield _rope()
    yield _gate()
    yield _experts()
    yield _conv()
    yield _gated_norm()
    yield _ssd()
    yield _delta_rule()


class _Inputs:
    """Random numbers, the same each time."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        """float32, from 0.1 to 1: steps, decays and weights."""
        return 0.1 + 0.9 * torch.rand(shape, generator=self.random)


def _attention(name: str, width: int, value_width: int) -> OpProbe:
    make = _Inputs()
    shapes = ((ROWS, 4, width), (ROWS, 2, width), (ROWS, 2, value_width))
    return OpProbe(
        name,
        "attention",
        tuple(make.normal(*shape) for shape in shapes),
        lambda bounds, q, k, v: (attention.attention(q, k, v, bounds=bounds),),
        lambda bounds, q, k, v: (exact_attention.attention(q, k, v, bounds=bounds),),
    )


def _loss() -> OpProbe:
    make = _Inputs()
    labels = torch.arange(ROWS) % VOCABULARY
    labels[3] = -100

    def run(_: Boundaries, hidden: Tensor, weight: Tensor) -> Results:
        losses = cross_entropy.linear_cross_entropy(
            hidden, weight, labels.to(hidden.device), summed=True
        )
        return (losses.sum(),)

    def reference(_: Boundaries, hidden: Tensor, weight: Tensor) -> Results:
        return (exact_cross_entropy.linear_cross_entropy(hidden, weight, labels).sum(),)

    inputs = (make.normal(ROWS, CHANNELS) / 4, make.normal(VOCABULARY, CHANNELS) / 4)
    return OpProbe("loss", "loss", inputs, run, reference)


def _norm() -> OpProbe:
    make = _Inputs()

    def reference(_: Boundaries, x: Tensor, delta: Tensor, weight: Tensor) -> Results:
        return x + delta, _rms_norm(x + delta) * weight

    inputs = (make.normal(ROWS, CHANNELS), make.normal(ROWS, CHANNELS), make.normal(CHANNELS))
    return OpProbe(
        "norm",
        "norm",
        inputs,
        lambda _, x, delta, weight: norm.add_norm(x, delta, weight, EPS),
        reference,
    )


def _rope() -> OpProbe:
    make, width = _Inputs(), 32
    angles = torch.arange(ROWS)[:, None] / 10.0 ** torch.arange(width // 2)
    cos, sin = angles.cos(), angles.sin()

    def run(_: Boundaries, x: Tensor, weight: Tensor) -> Results:
        return (rope.norm_rotate(x, weight, EPS, cos.to(x.device), sin.to(x.device)),)

    def reference(_: Boundaries, x: Tensor, weight: Tensor) -> Results:
        return (exact_rope.rotate(_rms_norm(x) * weight, cos, sin),)

    return OpProbe(
        "rope", "rope", (make.normal(ROWS, 4, width), make.normal(width)), run, reference
    )


def _gate() -> OpProbe:
    make, inner = _Inputs(), 64
    inputs = (make.normal(ROWS, inner), make.normal(ROWS, inner), make.normal(CHANNELS, inner))
    return OpProbe(
        "gate",
        "gate",
        inputs,
        lambda _, first, up, weight: (gate.gated_linear(first, up, weight),),
        lambda _, first, up, weight: ((silu(first) * up) @ weight.T,),
    )


def _experts() -> OpProbe:
    make, count, inner = _Inputs(), 3, 32
    ids = torch.stack([torch.arange(ROWS) % count, (torch.arange(ROWS) + 1) % count], dim=1)

    def run(_: Boundaries, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Results:
        output, _counts = experts.expert_mlp(
            x, ids.to(x.device), weights, gate_up_E2FC=gate_up, down_ECF=down
        )
        return (output,)

    def reference(
        _: Boundaries, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Results:
        order, _counts, offsets = exact_experts.sort_by_expert(ids, count)
        rows = exact_experts.grouped_mlp(
            exact_experts.dispatch(x, order), offsets, gate_up_E2FC=gate_up, down_ECF=down
        )
        return (exact_experts.combine(rows, order, weights),)

    inputs = (
        make.normal(ROWS, CHANNELS),
        make.uniform(ROWS, 2),
        make.normal(count, 2 * inner, CHANNELS) / 4,
        make.normal(count, CHANNELS, inner) / 4,
    )
    return OpProbe("experts", "experts", inputs, run, reference)


def _conv() -> OpProbe:
    make = _Inputs()

    def run(bounds: Boundaries, x: Tensor, weight: Tensor, bias: Tensor) -> Results:
        return (conv.causal_conv(x, weight, bias, bounds=bounds, activation=True),)

    def reference(bounds: Boundaries, x: Tensor, weight: Tensor, bias: Tensor) -> Results:
        return (exact_conv.causal_conv(x, weight, bias, bounds=bounds, activation=True),)

    inputs = (make.normal(ROWS, CHANNELS), make.normal(CHANNELS, 4), make.normal(CHANNELS))
    return OpProbe("convolution", "conv", inputs, run, reference)


def _gated_norm() -> OpProbe:
    make = _Inputs()

    def run(_: Boundaries, x: Tensor, by: Tensor, weight: Tensor) -> Results:
        return (
            gated_norm.norm_after_gate(x, by, weight, groups=2, eps=EPS),
            gated_norm.norm_before_gate(x, by, weight, eps=EPS),
        )

    def reference(_: Boundaries, x: Tensor, by: Tensor, weight: Tensor) -> Results:
        after = _rms_norm((x * silu(by)).unflatten(1, (2, -1))).flatten(1)
        return after * weight, _rms_norm(x) * weight * silu(by)

    inputs = (make.normal(ROWS, CHANNELS), make.normal(ROWS, CHANNELS), make.normal(CHANNELS))
    return OpProbe("gated norm", "gated norm", inputs, run, reference)


def _ssd() -> OpProbe:
    make, heads, groups = _Inputs(), 4, 2

    def run(bounds: Boundaries, x: Tensor, dt: Tensor, A: Tensor, *rest: Tensor) -> Results:
        B, C, D = rest
        return ssd.ssd(x, dt, -A, B, C, D_H=D, bounds=bounds)

    def reference(bounds: Boundaries, x: Tensor, dt: Tensor, A: Tensor, *rest: Tensor) -> Results:
        B, C, D = rest
        return exact_ssd.ssd(x, dt, -A, B, C, D_H=D, bounds=bounds)

    inputs = (
        make.normal(ROWS, heads, 32),
        make.uniform(ROWS, heads),
        make.uniform(heads),
        make.normal(ROWS, groups, 16),
        make.normal(ROWS, groups, 16),
        make.uniform(heads),
    )
    return OpProbe("state-space scan", "ssd", inputs, run, reference)


def _delta_rule() -> OpProbe:
    make, heads, width = _Inputs(), 4, 64

    def run(bounds: Boundaries, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Results:
        g, beta = gates
        return delta_rule.prepare_heads(q, k, v, -g, beta, bounds=bounds).run()

    def reference(bounds: Boundaries, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Results:
        g, beta = gates
        q, k = (_unit(x).repeat_interleave(2, dim=1) for x in (q, k))
        return exact_delta_rule.gated_delta_rule(q, k, v, -g, beta, bounds=bounds)

    inputs = (
        make.normal(ROWS, heads // 2, width),
        make.normal(ROWS, heads // 2, width),
        make.normal(ROWS, heads, width),
        make.uniform(ROWS, heads),
        make.uniform(ROWS, heads),
    )
    return OpProbe("delta rule", "delta rule", inputs, run, reference)


def _rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + delta_rule.L2_EPS).sqrt()
