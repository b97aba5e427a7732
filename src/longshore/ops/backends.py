"""The backends of each op, and which one runs for the tensors of a call.

In: an op's name and the tensors of a call. Out: the module of the first backend that supports them,
or None where plain torch, in the op's own module, serves. In bfloat16:

    pick("norm", x, weight)        longshore.ops.kernels.norm     on an H200
    pick("norm", x, weight)        None                           on a CPU; chosen() then says
                                   {"norm": "plain torch (triton: the tensors are on cpu, …)"}

What depends on an option instead of a tensor (softcap, a limit of dt) the op's module declines
itself, before it asks. CONTRIBUTING.md lists what a new backend needs; its module is imported when
it is first picked. `use_kernels("plain")`, which is train.kernels=plain, leaves only backends that
are parts of torch and need nothing but torch.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from longshore.settings import Kernels
from longshore.user_code import is_installed

HALF = (torch.float16, torch.bfloat16)
AMPERE, HOPPER = (8, 0), (9, 0)
ALIGNMENT = 16
"""Bytes that must divide the rows of every operand of torch's grouped product."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute an op."""

    name: str
    """For people: in doctor and in a run's log."""
    module: str
    """What has the op's functions, as BACKENDS lists them; imported when it is picked."""
    refusal: Callable[..., str | None]
    """Why it does not support a call with these tensors, or None if it does; imports nothing.

    It may ask for dtypes, shapes and devices alone: the answer is kept.
    """
    package: str = ""
    """What must be installed besides torch."""


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, asked once: pick() is called for every op of every layer."""
    return torch.cuda.get_device_capability(device)


def triton_refusal(*tensors: Tensor, oldest: tuple[int, int] = AMPERE) -> str | None:
    """Why Triton kernels cannot take such tensors; triton's interpreter takes those of a CPU."""
    for x in tensors:
        if x.dtype == torch.float64:
            return "float64 is left to plain torch"
        if not x.is_cuda and not _interpreted():
            return f"the tensors are on {x.device.type}, not on CUDA"
        if x.is_cuda and capability(x.device) < oldest:
            return f"the device is older than compute capability {oldest[0]}.{oldest[1]}"
    return None


def _flash4(q: Tensor, v: Tensor) -> str | None:
    """flash-attn-4, for the GPUs and widths it was tested with."""
    width, value_width = q.shape[2], v.shape[2]
    if refused := _flash(q):
        return refused
    if capability(q.device) != HOPPER:
        return "it was tested on compute capability 9.0 only"
    if (width, value_width) == (192, 128) or (width == value_width and width in (64, 128, 256)):
        return None
    return f"queries of width {width} and values of {value_width} were not tested"


def _varlen(q: Tensor, v: Tensor) -> str | None:
    """torch's flash kernels; narrower values are padded."""
    width, value_width = q.shape[2], v.shape[2]
    if refused := _flash(q):
        return refused
    if capability(q.device) < AMPERE:
        return "the device is older than compute capability 8.0"
    if value_width > width:
        return f"values of width {value_width} are wider than queries of {width}"
    if width % 8 or width > 256:
        return f"a head's width of {width} is not a multiple of 8 up to 256"
    return None


def _flash(q: Tensor) -> str | None:
    if not q.is_cuda:
        return f"the tensors are on {q.device.type}, not on CUDA"
    if q.dtype not in HALF:
        return f"{q.dtype} is not half precision"
    return None if len(q) else "there are no rows"


def grouped_refusal(*operands: Tensor) -> str | None:
    """Why torch's grouped product does not support these operands, or None if it does."""
    for operand in operands:
        if operand.dtype not in (torch.float32, torch.bfloat16):
            return f"the grouped product takes float32 and bfloat16, not {operand.dtype}"
        if operand.dtype != operands[0].dtype:
            return (
                f"the grouped product takes one dtype, not {operands[0].dtype} and {operand.dtype}"
            )
        if operand.shape[-1] * operand.element_size() % ALIGNMENT:
            return f"rows of {operand.shape[-1]} numbers are not a multiple of {ALIGNMENT} bytes"
    return None


def _experts(x: Tensor, gate_up: Tensor, down: Tensor) -> str | None:
    """Kernels around the grouped product, which on GPUs is one kernel for bfloat16 alone."""
    if refused := triton_refusal(x, gate_up, down) or grouped_refusal(x, gate_up, down):
        return refused
    if x.is_cuda and x.dtype != torch.bfloat16:
        return f"{x.dtype} is not bfloat16"
    return None if len(x) else "there are no rows"


def _conv(x_TC: Tensor, weight_CK: Tensor) -> str | None:
    taps = weight_CK.shape[1]
    if refused := triton_refusal(x_TC, weight_CK):
        return refused
    if not 2 <= taps <= 8:
        return f"{taps} taps are not 2 to 8"
    return None if len(x_TC) else "there are no rows"


def _gated_norm(x: Tensor, gate: Tensor) -> str | None:
    if refused := triton_refusal(x, gate):
        return refused
    if x.shape[-1] > 65536:
        return f"rows of {x.shape[-1]} channels are wider than 65536"
    return None if x.numel() else "there are no rows"


GATED_WRONG = ((3, 4, 0), (3, 7, 0))
"""Triton versions with which flash-linear-attention refuses its gated backward on Hopper."""


def gated_is_wrong(version: str, on: tuple[int, int]) -> bool:
    """Whether flash-linear-attention refuses its gated backward, as incorrect."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    return on[0] == HOPPER[0] and GATED_WRONG[0] <= numbers <= GATED_WRONG[1]


def _delta_rule(k: Tensor, v: Tensor) -> str | None:
    """flash-linear-attention's chunked kernels."""
    if refused := triton_refusal(k, v):
        return refused
    if not v.is_cuda or v.dtype not in HALF:
        return f"{v.dtype} on {v.device.type} is not half precision on CUDA"
    if k.shape[2] > 256:
        return f"keys of width {k.shape[2]} are wider than 256"
    if gated_is_wrong(_triton_version(), capability(v.device)):
        return f"its backward is incorrect on Hopper with Triton {_triton_version()}"
    return None if len(v) else "there are no rows"


@lru_cache
def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _norm(x: Tensor, weight: Tensor) -> str | None:
    width = weight.shape[0]
    if refused := _pointwise(x, weight):
        return refused
    if x.dtype not in (weight.dtype, torch.float32):
        return f"a norm of {x.dtype} with a weight of {weight.dtype}"
    return None if width <= 8192 else f"rows of {width} are wider than 8192"


def _rope(x: Tensor, cos: Tensor, weight: Tensor | None = None) -> str | None:
    if refused := _pointwise(x, cos):
        return refused
    if cos.dtype != torch.float32 or x.shape[2] > 2048:
        return f"tables of {cos.dtype} and heads of {x.shape[2]}"
    return None if weight is None else _norm(x, weight)


def _pointwise(*tensors: Tensor) -> str | None:
    if refused := triton_refusal(*tensors):
        return refused
    return None if all(x.numel() for x in tensors) else "there are no rows"


def _ssd(x: Tensor, B: Tensor) -> str | None:
    """Triton, for widths whose states fit in registers."""
    width, state = x.shape[2], B.shape[2]
    if width > 128 or state > 256:
        return f"heads of width {width} with a state of {state} are wider than 128 and 256"
    return triton_refusal(x, B)


def _sparse(q: Tensor, *keys: Tensor) -> str | None:
    """Triton, for heads that fit in registers."""
    if q.shape[2] > 512:
        return f"heads of width {q.shape[2]} are wider than 512"
    return triton_refusal(q, *keys)


def _indexer(q: Tensor, keys: Tensor) -> str | None:
    """Triton, for heads that fit in registers."""
    if q.shape[2] > 256:
        return f"heads of width {q.shape[2]} are wider than 256"
    return triton_refusal(q, keys)


def _hyper(rows: Tensor, weight: Tensor) -> str | None:
    """Triton; weights stay float32."""
    if weight.dtype != torch.float32:
        return f"weights of {weight.dtype}"
    return _pointwise(rows, weight)


def _triton(module: str, refusal: Callable[..., str | None]) -> tuple[Backend, ...]:
    return (Backend("triton", f"longshore.ops.kernels.{module}", refusal, package="triton"),)


_FLASH4, _VARLEN = "longshore.ops.attention_flash4", "longshore.ops.attention_varlen"
_FLA = "longshore.ops.delta_rule_fla"
BACKENDS: dict[str, tuple[Backend, ...]] = {
    "indexer": _triton("indexer", _indexer),  # scores, chosen_scores, chosen_gradients
    "sparse attention": _triton("sparse_attention", _sparse),  # forward, backward
    "ssd": _triton("ssd", _ssd),  # prepare, which returns a PreparedScan
    "attention": (  # forward, backward
        Backend("flash-attn-4", _FLASH4, _flash4, package="flash_attn.cute"),
        Backend("torch varlen", _VARLEN, _varlen),
    ),
    # linear_loss
    "loss": _triton("cross_entropy", triton_refusal),
    "experts": (  # sorted_mlp
        *_triton("experts", _experts),
        Backend("torch grouped_mm", "longshore.ops.experts", grouped_refusal),
    ),
    "conv": _triton("conv", _conv),  # conv
    # prepare, which returns a PreparedScan
    "delta rule": (Backend("flash-linear-attention", _FLA, _delta_rule, package="fla"),),
    "gated norm": _triton("norm", _gated_norm),  # gated_norm
    "norm": _triton("norm", _norm),  # rms_norm, add_norm
    "gate": _triton("gate", _pointwise),  # gated, gated_linear
    "hyper-connections": _triton("hyper", _hyper),  # project, collapse, expand
    "projections": (Backend("torch in one node", "longshore.ops.linear", triton_refusal),),
    "rope": _triton("rope", _rope),  # rotate, norm_rotate
}
"""By op, in order of preference; where none is left, plain torch. Beside it: what modules have."""

_plain = False
_chosen: dict[str, str] = {}


Served = tuple[tuple[Backend, ...], ModuleType | None, str]
"""What BACKENDS had for an op then, the module that was picked, and its name for chosen()."""
_served: dict[tuple[object, ...], Served] = {}
"""By op, current device and the tensors' dtypes, shapes and devices; use_kernels forgets all."""
MOST_SERVED = 10_000


def pick(op: str, *tensors: Tensor) -> ModuleType | None:
    """The module of the first backend that supports these tensors, or None for plain torch."""
    # What torch.compile traces it fuses itself.
    if torch.compiler.is_compiling():
        return None
    backends = BACKENDS[op]
    if not tensors[0].is_cuda:
        served = _serve(backends, *tensors)
    else:
        parts = [part for x in tensors for part in (x.dtype, x.shape, x.device)]
        key = (op, torch.cuda.current_device(), *parts)
        known = _served.get(key)
        if known is None or known[0] is not backends:
            if len(_served) >= MOST_SERVED:
                _served.clear()
            known = _served[key] = _serve(backends, *tensors)
        served = known
    _, module, _chosen[op] = served
    return module


def _serve(backends: tuple[Backend, ...], *tensors: Tensor) -> Served:
    refused = []
    for backend in backends:
        why_not = _refusal(backend, *tensors)
        if why_not is None:
            return backends, importlib.import_module(backend.module), backend.name
        refused.append(f"{backend.name}: {why_not}")
    return backends, None, f"plain torch ({'; '.join(refused)})"


def chosen() -> dict[str, str]:
    """What the last call of each op was served by, and for plain torch why."""
    return dict(_chosen)


def kernels_line() -> str:
    """What serves each op, in one line; ops that the model does not have are not in it."""
    by_name: dict[str, list[str]] = {}
    for op, name in sorted(_chosen.items()):
        by_name.setdefault(name, []).append(op)
    return "; ".join(f"{', '.join(ops)} by {name}" for name, ops in sorted(by_name.items()))


def use_kernels(kernels: Kernels) -> None:
    """From now on in this process. plain: no package but torch."""
    global _plain
    _plain = kernels == "plain"
    _chosen.clear()
    _served.clear()


@contextmanager
def using_kernels(kernels: Kernels) -> Iterator[None]:
    """use_kernels for a while: that of a run, a test or a measurement."""
    before = _plain
    use_kernels(kernels)
    try:
        yield
    finally:
        use_kernels("plain" if before else "auto")


def _refusal(backend: Backend, *tensors: Tensor) -> str | None:
    if backend.package and _plain:
        return "train.kernels is plain"
    if backend.package and tensors[0].is_cuda:
        # Unlike torch's own, such kernels are launched on the current device.
        current = torch.cuda.current_device()
        if tensors[0].device.index != current:
            return f"the tensors are on {tensors[0].device}, but cuda:{current} is current"
    refused = backend.refusal(*tensors)
    if refused is None and backend.package and not is_installed(backend.package):
        return f"{backend.package} is not installed"
    return refused


def _interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU, which only tests do."""
    return False
