"""Probes of the ops: the backend of each on this machine, whether it is right, what is faster.

In: nothing; it tests the first GPU, or the CPU. Out: findings, ops with the same answer in one:

    experts: torch grouped_mm, matches the reference
    norm, rope, gate: triton, match the reference
    delta rule: plain torch (flash-linear-attention: fla is not installed), matches …, but is slow

An op is tested in the dtype that training uses there, forward and backward, on sequences of 1, 5
and 10 tokens, against ops/reference in float64 on the CPU; op_probes.py has the inputs.

What `longshore doctor` tries of each op: tiny inputs, the op, and what it should give.

In: nothing. Out: OpProbe, one for each op. Its inputs are those of sequences of 1, 5 and 10 tokens;
float64 ones become the dtype that training uses, float32 ones stay. Widths are multiples of 16, so
that kernels take them. Norm, with x, what is added, and the weight:

    probe.run(bounds, x, delta, weight)                 x + delta, and its norm
    probe.reference(bounds, x, delta, weight)           the same in float64 on the CPU

T rows, H heads, D and V width of keys and values, C channels, E experts, K experts of a token.

A finding of `longshore doctor`.

In: a mark, a text and advice. Out: frozen data, which ranks send to each other.

    warn("open files: the limit is 256, but 64 ranks need 768", "ulimit -n 768")
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

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

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longshore.batch import Boundaries

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


Mark = Literal["ok", "warn", "bad"]
LONGEST = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a probe."""

    mark: Mark
    """ok, warn, or bad: broken, and training needs it."""
    text: str
    way_out: str = ""
    """Advice."""


def good(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str, way_out: str = "") -> Finding:
    return Finding("warn", text, way_out)


def bad(text: str, way_out: str = "") -> Finding:
    return Finding("bad", text, way_out)


def first_line(error: object) -> str:
    """An error or a warning in one line; an error with its type."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else ""
    if isinstance(error, BaseException) and not isinstance(error, Warning):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


CLOSE = {"bfloat16": 5e-2, "float32": 1e-4}
PLAIN = "plain torch"
REPORT = "this does not work on this machine; please report it, and train with train.kernels=plain"
EXTRA = "pip install 'longshore[gpu]'"
PACKAGES = {
    "Triton": "triton",
    "flash-attn-4": "flash-attn-4",
    "flash-linear-attention": "flash-linear-attention",
}


class OpAnswer(NamedTuple):
    """What was learnt of an op; ops with equal ones share a line."""

    backend: str
    """The one that ran; for plain torch with the reasons."""
    wrong: str
    """How it differs from the reference, or ""."""


def ops() -> Iterator[Finding]:
    import torch

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if has_gpu else torch.float32
    names: dict[OpAnswer, list[str]] = {}
    for probe in op_probes():
        names.setdefault(_answer(probe, device, dtype), []).append(probe.name)
    for answer, those in names.items():
        yield op_finding(those, answer, has_gpu=has_gpu)


def op_finding(names: list[str], answer: OpAnswer, *, has_gpu: bool) -> Finding:
    """The line about ops that have this answer."""
    text = f"{', '.join(names)}: {answer.backend}"
    if answer.wrong:
        return bad(f"{text}: {answer.wrong}", REPORT)
    text += ", matches the reference" if len(names) == 1 else ", match the reference"
    if not has_gpu or not answer.backend.startswith(PLAIN):
        return good(text)
    return warn(f"{text}, but {'is' if len(names) == 1 else 'are'} slow", _way_out(answer.backend))


def _way_out(backend: str) -> str:
    """What to install so that plain torch need not serve; the reasons are in its name."""
    if "triton is not installed" in backend:
        return "pip install triton"
    if "is not installed" in backend:
        return EXTRA
    if "incorrect on Hopper" in backend:
        return "pip install 'triton>=3.7.1'"
    return ""


def _answer(probe: "OpProbe", device: "torch.device", dtype: "torch.dtype") -> OpAnswer:
    from longshore.ops.backends import chosen, only

    with only("auto"):
        wrong = _differs(probe, device=device, dtype=dtype)
        backend = chosen().get(probe.op, "no backend was chosen")
    # On a CPU the reason is always the same: kernels are for GPUs.
    if device.type == "cpu" and backend.startswith(PLAIN):
        backend = PLAIN
    return OpAnswer(backend, wrong)


def _differs(probe: "OpProbe", *, device: "torch.device", dtype: "torch.dtype") -> str:
    """How the op's outputs and gradients differ from the reference; "" if they match."""
    import torch

    given = [x.to(dtype) if x.dtype == torch.float64 else x for x in probe.inputs]
    try:
        ours = _with_gradients(probe.run, bounds_on(device), [x.to(device) for x in given])
    except Exception as error:
        return f"fails: {first_line(error)}"
    close = CLOSE[str(dtype).removeprefix("torch.")]
    # The reference gets the same inputs, with the same rounding.
    cpu = torch.device("cpu")
    theirs = _with_gradients(probe.reference, bounds_on(cpu), [x.double() for x in given])
    outputs = len(theirs) - len(given)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        off = float((a.cpu().double() - b).abs().max() / b.abs().max())
        if not off <= close:
            which = number - outputs + 1
            what = f"gradient {which} of its inputs" if which > 0 else "its output"
            return f"{what} is wrong by {off:.0%} of the largest value"
    return ""


def _with_gradients(
    op: "Callable[..., Results]", bounds: "Boundaries", given: list["Tensor"]
) -> list["Tensor"]:
    """The outputs, then the gradient of each input."""
    import torch

    leaves = [x.detach().requires_grad_() for x in given]
    outputs = op(bounds, *leaves)
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in outputs]
    torch.stack([x.square().sum() for x in wide]).sum().backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [*(x.detach() for x in outputs), *gradients]


def kernels() -> Iterator[Finding]:
    """The packages with kernels for GPUs; what is slow without them is said by `ops`."""
    import torch

    from longshore.user_code import is_installed

    if not torch.cuda.is_available():
        yield good("faster kernels exist only for GPUs")
        return
    versions = {name: _version(package) for name, package in PACKAGES.items()}
    installed = [f"{name} {version}" for name, version in versions.items() if version]
    if installed:
        yield good(", ".join(installed))
    if not versions["Triton"]:
        yield warn("Triton is missing: train.compile=true will fail", "pip install triton")
    if not is_installed("flash_attn.cute"):
        yield flash_is_missing(torch.cuda.get_device_capability(0))


def flash_is_missing(capability: tuple[int, int]) -> Finding:
    from longshore.ops.backends import HOPPER

    text = "flash-attn-4 is not installed"
    if capability != HOPPER:
        return good(f"{text}; it is used on compute capability 9.0 only")
    return warn(f"{text}: 1.4 to 1.9 times as fast as torch's attention on an H200", EXTRA)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
