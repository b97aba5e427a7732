"""Findings of `longshore doctor`, and probes of the ops: what serves each, and is it right?

In: nothing; it tests the first GPU, or the CPU. Out: findings, each a mark, a text and advice; ops
with the same answer are in one:

    experts: torch grouped_mm, matches the reference
    norm, rope, gate: triton, match the reference
    delta rule: plain torch (flash-linear-attention: fla is not installed), matches …, but is slow

An op is tested in the dtype that training uses there, forward and backward, on sequences of 1, 5
and 10 tokens, against ops/reference in float64 on the CPU; op_probes.py has the inputs. torch is
imported inside functions, so that a broken one can be reported.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longshore.batch import Boundaries
    from longshore.doctor.op_probes import OpProbe, Results

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

    from longshore.doctor.op_probes import op_probes

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

    from longshore.doctor.op_probes import bounds_on

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
