"""What `longshore doctor` checks on this machine: Python, torch, devices, ops, packages, disk.

In: DoctorOptions, from the command line. Out: findings, section by section, each ok, a warning, or
broken, with advice. A probe that fails is a finding too: `examine` never raises, and torch is
imported only inside probes, so that a broken torch can be reported.

    Finding("warn", "/dev/shm has 0.1 GiB", "start the container with --shm-size=16g")
    Finding("ok", "norm, rope, gate: triton, match the reference")
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PYTHON = (3, 11)
TORCH = (2, 11)
GIB = 1 << 30
LEAST_DISK = 10 * GIB
LEAST_SHARED = GIB
FILES_A_RANK = 8  # gloo connects each rank with each other, in several groups
FILES_ALONE = 256
DRIVER = Path("/proc/driver/nvidia/version")
LIMIT = Path("/sys/fs/cgroup/memory.max")
SHARED = Path("/dev/shm")
TEXT = ("tokenizers", "jinja2")
OPTIONAL = ("transformers", "tensorboard", "wandb")
KERNELS = {
    "Triton": "triton",
    "flash-attn-4": "flash-attn-4",
    "flash-linear-attention": "flash-linear-attention",
}
"""Packages with kernels, and what pip calls them."""
REPORT = "this does not work on this machine; please report it, and train with train.kernels=plain"
EXTRA = "pip install 'longshore[gpu]'"
LONGEST_LINE = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a probe."""

    mark: Literal["ok", "warn", "bad"]
    """bad: broken, and training needs it."""
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
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What to check for."""

    gpus: int
    """GPUs visible in the environment."""
    ranks: int
    """Ranks of a run."""
    folder: Path
    """Where runs are written."""


Probe = Callable[[DoctorOptions], Iterator[Finding]]


def examine(setting: DoctorOptions) -> Iterator[tuple[str, tuple[Finding, ...]]]:
    """Yields each section's name and its findings."""
    for name, probe in PROBES:
        yield name, findings_of(probe, setting)


def findings_of(probe: Probe, setting: DoctorOptions) -> tuple[Finding, ...]:
    """The findings of a probe; if it fails, that is the last one."""
    findings = []
    try:
        for finding in probe(setting):
            findings.append(finding)
    except (Exception, SystemExit) as error:
        findings.append(warn(f"the check failed: {first_line(error)}"))
    return tuple(findings)


def machine(setting: DoctorOptions) -> Iterator[Finding]:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON:
        yield bad(text, f"Longshore needs Python {_dotted(PYTHON)} or newer")
    else:
        yield good(f"{text}, longshore {version_of('longshore') or 'not installed'}")
    yield _cores_and_memory()
    yield _open_files(setting.ranks)


def _cores_and_memory() -> Finding:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{cores} CPU core{'s' if cores > 1 else ''}, {size(total)} of memory"
    limit = LIMIT.read_text().strip() if LIMIT.is_file() else "max"
    if limit.isdigit() and int(limit) < total:
        return warn(
            f"{text}, of which this container may use {size(int(limit))}",
            "to train on the CPU set plan.capacity, because `auto` assumes all of the memory",
        )
    return good(text)


def _open_files(ranks: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs = FILES_ALONE + FILES_A_RANK * ranks
    if soft in (resource.RLIM_INFINITY, -1):
        return good("open files: no limit")
    if soft < needs:
        return warn(
            f"open files: the limit is {soft:,}, but {ranks} ranks need {needs:,}",
            f"ulimit -n {needs}",
        )
    return good(f"open files: {soft:,}")


def torch_build(setting: DoctorOptions) -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield bad(
            f"torch cannot be imported: {first_line(error)}",
            f"pip install 'torch>={_dotted(TORCH)}', in the build for your GPUs",
        )
        return
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    text = f"torch {torch.__version__}, built for {build}"
    if _numbers(torch.__version__) < TORCH:
        yield bad(text, f"Longshore needs torch {_dotted(TORCH)} or newer")
    else:
        yield good(text)
    if not dist.is_available() or not dist.is_gloo_available():
        yield bad("this torch has no gloo, which ranks need", "install another build")
        return
    nccl = dist.is_nccl_available()
    if setting.gpus > 1 and not nccl:
        yield bad(
            "NCCL is not available, and several GPUs need it (gloo is available)",
            "install a CUDA build",
        )
    else:
        yield good(f"gloo is available, NCCL {'too' if nccl else 'is not (a CPU needs none)'}")


def devices(setting: DoctorOptions) -> Iterator[Finding]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    why = first_line(caught[0].message) if caught else ""
    if not usable and setting.gpus:
        build = "" if torch.version.cuda else "this torch is built for the CPU only"
        yield bad(
            f"{setting.gpus} GPU{'s are' if setting.gpus > 1 else ' is'} visible, but torch cannot "
            f"use {'them' if setting.gpus > 1 else 'it'}: {why or build or 'reason unknown'}",
            "install torch for your driver's CUDA, or train with train.device=cpu",
        )
    elif not usable:
        yield good("no GPU: training runs on the CPU, which is for trying things out")
    yield _computes(torch.device("cpu"), "the CPU")
    if usable:
        yield from _gpus()


def _gpus() -> Iterator[Finding]:
    import torch

    text = DRIVER.read_text() if DRIVER.is_file() else ""
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    yield good(f"{torch.cuda.device_count()} GPUs, driver {version[1] if version else 'unknown'}")
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        text = (
            f"GPU {number}: {gpu.name}, {size(gpu.total_memory)}, compute capability "
            f"{gpu.major}.{gpu.minor}"
        )
        yield _computes(torch.device("cuda", number), text)


def _computes(device: "torch.device", text: str) -> Finding:
    """Checks a matrix product and its gradient against known values."""
    import torch

    try:
        ones_88 = torch.ones(8, 8, device=device, requires_grad=True)
        (ones_88 @ ones_88).sum().backward()
        if ones_88.grad is None or ones_88.grad.tolist() != [[16.0] * 8] * 8:
            return bad(f"{text}: a small matrix product is wrong", "do not train on it")
    except Exception as error:
        return bad(
            f"{text}: a small matrix product fails: {first_line(error)}",
            "this build of torch does not support the device; install one that does",
        )
    return good(f"{text}: works")


def ops(setting: DoctorOptions) -> Iterator[Finding]:
    """Runs each op on the first GPU, or the CPU; ops with the same result share a finding."""
    import torch

    from longshore.doctor.probes import try_ops

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if has_gpu else torch.float32
    names: dict[tuple[str, str], list[str]] = {}
    for name, backend, wrong in try_ops(device, dtype):
        names.setdefault((backend, wrong), []).append(name)
    for (backend, wrong), those in names.items():
        yield op_finding(those, backend, wrong, has_gpu=has_gpu)


def op_finding(names: list[str], backend: str, wrong: str, *, has_gpu: bool) -> Finding:
    """The line about ops with this backend. wrong: how they differ from the reference, or ""."""
    text = f"{', '.join(names)}: {backend}"
    if wrong:
        return bad(f"{text}: {first_line(wrong)}", REPORT)
    text += ", matches the reference" if len(names) == 1 else ", match the reference"
    if not has_gpu or not backend.startswith("plain torch"):
        return good(text)
    # The name of plain torch says why no faster backend was chosen.
    way_out = ""
    if "triton is not installed" in backend:
        way_out = "pip install triton"
    elif "is not installed" in backend:
        way_out = EXTRA
    elif "incorrect on Hopper" in backend:
        way_out = "pip install 'triton>=3.7.1'"
    return warn(f"{text}, but {'is' if len(names) == 1 else 'are'} slow", way_out)


def kernels(setting: DoctorOptions) -> Iterator[Finding]:
    """The packages with kernels for GPUs; what is slow without them is said by `ops`."""
    import torch

    from longshore.ops.backends import HOPPER
    from longshore.user_code import is_installed

    if not torch.cuda.is_available():
        yield good("faster kernels exist only for GPUs")
        return
    versions = {name: _version(package) for name, package in KERNELS.items()}
    installed = [f"{name} {version}" for name, version in versions.items() if version]
    if installed:
        yield good(", ".join(installed))
    if not versions["Triton"]:
        yield warn("Triton is missing: train.compile=true will fail", "pip install triton")
    if is_installed("flash_attn.cute"):
        return
    text = "flash-attn-4 is not installed"
    if torch.cuda.get_device_capability(0) == HOPPER:
        yield warn(f"{text}: 1.4 to 1.9 times as fast as torch's attention on an H200", EXTRA)
    else:
        yield good(f"{text}; it is used on compute capability 9.0 only")


def packages(setting: DoctorOptions) -> Iterator[Finding]:
    for name in ("numpy", "pyarrow", "rich", "safetensors"):
        if version_of(name) is None:
            yield bad(f"{name} is missing", f"pip install {name}")
    missing = [name for name in TEXT if version_of(name) is None]
    if missing:
        text = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing"
        yield warn(f"{text}, needed for text", "pip install 'longshore[hf]'")
    else:
        yield good("for text: " + ", ".join(f"{name} {version_of(name)}" for name in TEXT))
    installed = [f"{name} {version_of(name)}" for name in OPTIONAL if version_of(name)]
    others = [name for name in OPTIONAL if not version_of(name)]
    if installed:
        yield good(f"optional: {', '.join(installed)}")
    if others:
        yield good(f"optional, not installed: {', '.join(others)}")


def storage(setting: DoctorOptions) -> Iterator[Finding]:
    path = setting.folder.absolute()
    above = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(above).free
    if not above.is_dir() or not os.access(above, os.W_OK):
        yield bad(f"{path} cannot be created: {above} is not writable", "use another folder")
    elif free < LEAST_DISK:
        yield warn(
            f"{setting.folder}/: {size(free)} of disk left",
            "weights of a billion parameters take 4 GiB; set another output.folder",
        )
    else:
        yield good(f"{setting.folder}/: {size(free)} of disk left")
    if not SHARED.is_dir():
        yield good(f"{SHARED} does not exist, but only NCCL needs it")
        return
    shared = shutil.disk_usage(SHARED).total
    text = f"{SHARED} has {size(shared)}"
    if shared < LEAST_SHARED:
        yield warn(text, "NCCL may run out of it; start the container with --shm-size=16g")
    else:
        yield good(text)


PROBES: tuple[tuple[str, Probe], ...] = (
    ("machine", machine),
    ("torch", torch_build),
    ("devices", devices),
    ("ops", ops),
    ("kernels", kernels),
    ("packages", packages),
    ("disk", storage),
)


def version_of(name: str) -> str | None:
    """The version of a package, without importing it; None if it is not installed."""
    if importlib.util.find_spec(name) is None:
        return None
    return _version(name) or "of unknown version"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def size(amount: int) -> str:
    return f"{amount / GIB:,.1f} GiB" if amount < 100 * GIB else f"{amount / GIB:,.0f} GiB"


def _numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" as (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
