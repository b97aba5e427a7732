"""Probes of the ops: the backend of each on this machine, whether it is right, what is faster.

In: nothing; it tests the first GPU, or the CPU. Out: findings. On a CPU:

    attention: blocks (varlen: the tensors are on cpu, not on CUDA), matches the reference

An op is tested in the dtype that training uses there, forward and backward, on sequences of 1, 5
and 10 tokens, against ops/reference in float64 on the CPU.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from longshore.doctor.result import Finding, bad, first_line, good, warn

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LENGTHS = (1, 5, 10)
CLOSE = {"bfloat16": 3e-2, "float32": 1e-4}
HOPPER = 9
GATED_WRONG = ((3, 4, 0), (3, 7, 0))
"""Triton versions with which flash-linear-attention refuses its gated backward on Hopper."""


def ops() -> Iterator[Finding]:
    import torch

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    for name, width, value_width in (("attention", 128, 128), ("attention of MLA", 192, 128)):
        yield _attention(name, (width, value_width), device=device, dtype=dtype)
    yield _experts(device, dtype)
    yield good("rotary embedding, convolution, scans, delta rule, loss: plain torch")


def _attention(
    name: str, widths: tuple[int, int], *, device: "torch.device", dtype: "torch.dtype"
) -> Finding:
    import torch

    from longshore.batch import Boundaries
    from longshore.ops.attention import attention
    from longshore.ops.backends import chosen, pick
    from longshore.ops.reference.attention import attention as reference

    random = torch.Generator().manual_seed(0)
    rows, (width, value_width) = sum(LENGTHS), widths
    shapes = ((rows, 4, width), (rows, 2, width), (rows, 2, value_width))
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    offsets = (0, *(sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))))

    def bounds(where: "torch.device") -> Boundaries:
        numbers = torch.tensor(offsets, dtype=torch.int32, device=where)
        return Boundaries(offsets, numbers, max(LENGTHS))

    here, cpu = bounds(device), bounds(torch.device("cpu"))
    is_plain = pick("attention", q.to(device, dtype), v.to(device, dtype)) is None
    text = f"{name}: {chosen()['attention']}"
    wrong = _differs(
        lambda *given: attention(*given, bounds=here),
        lambda *given: reference(*given, bounds=cpu),
        (q, k, v),
        device=device,
        dtype=dtype,
    )
    if wrong:
        return bad(
            f"{text}: {wrong}", "this kernel does not work on this machine; please report it"
        )
    if device.type == "cuda" and is_plain:
        return warn(
            f"{text}: matches the reference, but is slow",
            "use a model whose head size a kernel supports",
        )
    return good(f"{text}, matches the reference")


def _experts(device: "torch.device", dtype: "torch.dtype") -> Finding:
    import torch

    from longshore.ops.experts import grouped_mlp, refusal
    from longshore.ops.reference.experts import grouped_mlp as reference

    random = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS), 16), (3, 64, 16), (3, 16, 32))
    x, gate_up, down = (
        torch.randn(shape, generator=random, dtype=torch.float64) / 4 for shape in shapes
    )
    offsets = torch.tensor([1, 6, 16], dtype=torch.int32)
    refused = refusal(*(tensor.to(device, dtype) for tensor in (x, gate_up, down)))
    text = f"experts: {f'loop over experts ({refused})' if refused else 'grouped product'}"
    wrong = _differs(
        lambda x, up, down: grouped_mlp(x, offsets.to(device), gate_up_E2FC=up, down_ECF=down),
        lambda x, up, down: reference(x, offsets, gate_up_E2FC=up, down_ECF=down),
        (x, gate_up, down),
        device=device,
        dtype=dtype,
    )
    if wrong:
        return bad(
            f"{text}: {wrong}", "this kernel does not work on this machine; please report it"
        )
    return (
        warn(f"{text}, matches the reference, but is slow")
        if refused
        else good(f"{text}, matches the reference")
    )


def _differs(
    op: Callable[..., "Tensor"],
    reference: Callable[..., "Tensor"],
    given: tuple["Tensor", ...],
    *,
    device: "torch.device",
    dtype: "torch.dtype",
) -> str:
    """How the op's output and gradients differ from the reference; "" if they match."""
    try:
        ours = _with_gradients(op, [tensor.to(device, dtype) for tensor in given])
    except Exception as error:
        return f"fails: {first_line(error)}"
    close = CLOSE[str(dtype).removeprefix("torch.")]
    # The reference gets the same inputs, with the same rounding.
    theirs = _with_gradients(reference, [tensor.to(dtype).to(tensor.dtype) for tensor in given])
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        off = float((a.cpu().double() - b).abs().max() / b.abs().max())
        if not off <= close:
            what = f"gradient {number} of its inputs" if number else "its output"
            return f"{what} is wrong by {off:.0%} of the largest value"
    return ""


def _with_gradients(op: Callable[..., "Tensor"], given: list["Tensor"]) -> list["Tensor"]:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    out = op(*leaves)
    (out * out).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def kernels() -> Iterator[Finding]:
    """Faster kernels for GPUs; the documentation has the measurements."""
    import torch

    from longshore.ops.backends import is_installed

    if not torch.cuda.is_available():
        yield good("faster kernels exist only for GPUs")
        return
    yield _package(
        "flash-attn-4",
        is_installed("flash_attn.cute"),
        gain="1.4 to 1.9 times as fast as torch's attention on an H200",
    )
    yield _package(
        "flash-linear-attention",
        is_installed("fla"),
        gain="kernels of the gated delta rule and of state-space scans",
    )
    yield _triton(torch.cuda.get_device_capability(0)[0])


def _package(name: str, is_here: bool, *, gain: str) -> Finding:
    if is_here:
        return good(f"{name} is installed")
    return warn(f"{name} is not installed: {gain}", f"pip install {name}")


def _triton(capability: int) -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return warn("Triton is missing: train.compile=true will fail", "pip install triton")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    low, high = GATED_WRONG
    if capability == HOPPER and low <= numbers <= high:
        return warn(
            f"Triton {version}: on Hopper flash-linear-attention refuses its gated backward as "
            "incorrect with this version",
            "for flash-linear-attention use Triton 3.7.1 or newer",
        )
    return good(f"Triton {version}")
