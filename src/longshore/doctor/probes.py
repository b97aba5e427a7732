"""What `longshore doctor` tries of each op: tiny inputs, the op, and what it should give.

In: a device and the dtype of training there. Out: each op's name, the backend that ran it, and how
its outputs or gradients differ from ops/reference in float64 on the CPU:

    ("norm", "triton", "")     ("loss", "plain torch", "gradient 2 of its inputs is wrong by 7% …")

Inputs are those of sequences of 1, 5 and 10 tokens. float64 ones become the dtype of training,
float32 ones stay. Widths are multiples of 16, so that kernels take them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import silu

from longshore.batch import Boundaries
from longshore.ops import (
    attention,
    conv,
    cross_entropy,
    delta_rule,
    experts,
    pointwise,
    reference,
    ssd,
)
from longshore.ops.backends import chosen, using_kernels

LENGTHS = (1, 5, 10)
ROWS = sum(LENGTHS)
CHANNELS = 32
VOCABULARY = 48
EPS = 1e-6
CLOSE = {torch.bfloat16: 5e-2, torch.float32: 1e-4}
"""What an output or gradient may differ by, as a share of its largest value."""
PLAIN = "plain torch"

Op = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class OpProbe:
    """One op, to be tried."""

    name: str
    """For people."""
    op: str
    """Its name in ops/backends.py."""
    inputs: tuple[Tensor, ...]
    """Tensors with gradients."""
    run: Op
    """The public function, called with boundaries and the inputs."""
    reference: Op
    """The same, slow and obvious."""


def try_ops(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, str, str]]:
    """For each op its name, its backend, and what is wrong with it: "" if it matches."""
    for probe in _probes():
        with using_kernels("auto"):
            wrong = _differs(probe, device=device, dtype=dtype)
            backend = chosen().get(probe.op, "no backend was chosen")
        # On a CPU the reason is always the same: kernels are for GPUs.
        is_plain = device.type == "cpu" and backend.startswith(PLAIN)
        yield probe.name, PLAIN if is_plain else backend, wrong


def _differs(probe: OpProbe, *, device: torch.device, dtype: torch.dtype) -> str:
    """How the op's outputs and gradients differ from the reference; "" if they match."""
    given = [x.to(dtype) if x.dtype == torch.float64 else x for x in probe.inputs]
    try:
        ours = _with_gradients(probe.run, device, [x.to(device) for x in given])
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"
    # The reference gets the same inputs, with the same rounding.
    cpu = torch.device("cpu")
    exact = _with_gradients(probe.reference, cpu, [x.double() for x in given])
    for number, (a, b) in enumerate(zip(ours, exact, strict=True)):
        off = float((a.cpu().double() - b).abs().max() / b.abs().max())
        if not off <= CLOSE[dtype]:
            which = number - (len(exact) - len(given)) + 1
            what = f"gradient {which} of its inputs" if which > 0 else "its output"
            return f"{what} is wrong by {off:.0%} of the largest value"
    return ""


def _with_gradients(op: Op, device: torch.device, given: list[Tensor]) -> list[Tensor]:
    """The outputs, then the gradient of each input."""
    offsets = tuple(accumulate(LENGTHS, initial=0))
    numbers = torch.tensor(offsets, dtype=torch.int32, device=device)
    leaves = [x.detach().requires_grad_() for x in given]
    outputs = op(Boundaries(offsets, numbers, max(LENGTHS)), *leaves)
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in outputs]
    torch.stack([x.square().sum() for x in wide]).sum().backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [*(x.detach() for x in outputs), *gradients]


def _normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Random tensors, the same each time."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def _uniform(*shapes: tuple[int, ...]) -> list[Tensor]:
    """float32, from 0.1 to 1: steps, decays and weights."""
    random = torch.Generator().manual_seed(0)
    return [0.1 + 0.9 * torch.rand(shape, generator=random) for shape in shapes]


def _rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + delta_rule.L2_EPS).sqrt()


def _probes() -> Iterator[OpProbe]:
    yield _attention("attention", 128, 128)
    yield _attention("attention of MLA", 192, 128)
    yield _loss()
    yield OpProbe(
        "norm",
        "norm",
        tuple(_normal((ROWS, CHANNELS), (ROWS, CHANNELS), (CHANNELS,))),
        lambda _, x, delta, weight: pointwise.add_norm(x, delta, weight, EPS),
        lambda _, x, delta, weight: (x + delta, _rms_norm(x + delta) * weight),
    )
    yield _rope()
    inner = 64
    yield OpProbe(
        "gate",
        "gate",
        tuple(_normal((ROWS, inner), (ROWS, inner), (CHANNELS, inner))),
        lambda _, gate, up, weight: (pointwise.gated_linear(gate, up, weight),),
        lambda _, gate, up, weight: ((silu(gate) * up) @ weight.T,),
    )
    yield _experts()
    yield _conv()
    yield _gated_norm()
    yield _ssd()
    yield _delta_rule()


def _attention(name: str, width: int, value_width: int) -> OpProbe:
    shapes = ((ROWS, 4, width), (ROWS, 2, width), (ROWS, 2, value_width))
    return OpProbe(
        name,
        "attention",
        tuple(_normal(*shapes)),
        lambda bounds, q, k, v: (attention.attention(q, k, v, bounds=bounds),),
        lambda bounds, q, k, v: (reference.attention(q, k, v, bounds=bounds),),
    )


def _loss() -> OpProbe:
    labels = torch.arange(ROWS) % VOCABULARY
    labels[3] = -100

    def run(_: Boundaries, hidden: Tensor, weight: Tensor) -> tuple[Tensor]:
        on_device = labels.to(hidden.device)
        return (cross_entropy.linear_cross_entropy(hidden, weight, on_device, summed=True).sum(),)

    def exact(_: Boundaries, hidden: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (reference.linear_cross_entropy(hidden, weight, labels).sum(),)

    hidden, weight = _normal((ROWS, CHANNELS), (VOCABULARY, CHANNELS))
    return OpProbe("loss", "loss", (hidden / 4, weight / 4), run, exact)


def _rope() -> OpProbe:
    width = 32
    angles = torch.arange(ROWS)[:, None] / 10.0 ** torch.arange(width // 2)
    cos, sin = angles.cos(), angles.sin()

    def run(_: Boundaries, x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (pointwise.norm_rotate(x, weight, EPS, cos.to(x.device), sin.to(x.device)),)

    def exact(_: Boundaries, x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (reference.rotate(_rms_norm(x) * weight, cos, sin),)

    return OpProbe("rope", "rope", tuple(_normal((ROWS, 4, width), (width,))), run, exact)


def _experts() -> OpProbe:
    count, inner = 3, 32
    ids = torch.stack([torch.arange(ROWS) % count, (torch.arange(ROWS) + 1) % count], dim=1)

    def run(_: Boundaries, x: Tensor, weights: Tensor, *both: Tensor) -> tuple[Tensor]:
        gate_up, down = both
        output, _counts = experts.expert_mlp(
            x, ids.to(x.device), weights, gate_up_E2FC=gate_up, down_ECF=down
        )
        return (output,)

    def exact(_: Boundaries, x: Tensor, weights: Tensor, *both: Tensor) -> tuple[Tensor]:
        gate_up, down = both
        order, _counts, offsets = reference.sort_by_expert(ids, count)
        sorted_rows = reference.dispatch(x, order)
        rows = reference.grouped_mlp(sorted_rows, offsets, gate_up_E2FC=gate_up, down_ECF=down)
        return (reference.combine(rows, order, weights),)

    (weights,) = _uniform((ROWS, 2))
    x, gate_up, down = _normal(
        (ROWS, CHANNELS), (count, 2 * inner, CHANNELS), (count, CHANNELS, inner)
    )
    return OpProbe("experts", "experts", (x, weights, gate_up / 4, down / 4), run, exact)


def _conv() -> OpProbe:
    def run(bounds: Boundaries, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (conv.causal_conv(x, weight, bias, bounds=bounds, activation=True),)

    def exact(bounds: Boundaries, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (reference.causal_conv(x, weight, bias, bounds=bounds, activation=True),)

    inputs = _normal((ROWS, CHANNELS), (CHANNELS, 4), (CHANNELS,))
    return OpProbe("convolution", "conv", tuple(inputs), run, exact)


def _gated_norm() -> OpProbe:
    def run(_: Boundaries, x: Tensor, by: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (
            pointwise.norm_after_gate(x, by, weight, groups=2, eps=EPS),
            pointwise.norm_before_gate(x, by, weight, eps=EPS),
        )

    def exact(_: Boundaries, x: Tensor, by: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        after = _rms_norm((x * silu(by)).unflatten(1, (2, -1))).flatten(1)
        return after * weight, _rms_norm(x) * weight * silu(by)

    inputs = _normal((ROWS, CHANNELS), (ROWS, CHANNELS), (CHANNELS,))
    return OpProbe("gated norm", "gated norm", tuple(inputs), run, exact)


def _ssd() -> OpProbe:
    heads, groups = 4, 2

    def probe(scan: Op) -> Op:
        return lambda bounds, x, dt, A, B, C, D: scan(x, dt, -A, B, C, D_H=D, bounds=bounds)

    x, B, C = _normal((ROWS, heads, 32), (ROWS, groups, 16), (ROWS, groups, 16))
    dt, A, D = _uniform((ROWS, heads), (heads,), (heads,))
    inputs = (x, dt, A, B, C, D)
    return OpProbe("state-space scan", "ssd", inputs, probe(ssd.ssd), probe(reference.ssd))


def _delta_rule() -> OpProbe:
    heads, width = 4, 64

    def run(bounds: Boundaries, q: Tensor, k: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        v, g, beta = more
        return delta_rule.prepare_heads(q, k, v, -g, beta, bounds=bounds).run()

    def exact(bounds: Boundaries, q: Tensor, k: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        v, g, beta = more
        q, k = (_unit(x).repeat_interleave(2, dim=1) for x in (q, k))
        return reference.gated_delta_rule(q, k, v, -g, beta, bounds=bounds)

    shape = (ROWS, heads // 2, width)
    inputs = [*_normal(shape, shape, (ROWS, heads, width)), *_uniform((ROWS, heads), (ROWS, heads))]
    return OpProbe("delta rule", "delta rule", tuple(inputs), run, exact)
