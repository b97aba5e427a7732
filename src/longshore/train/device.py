"""The device of a rank: which one, its process group backend, dtype, memory and peak.

In: what the user asked for and the rank's local rank. Out: a torch device and facts about it. Two
ranks on a machine with one GPU share it and use gloo, because NCCL allows one rank per GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longshore.arch.machine import vendor_peak


def pick_device(asked: str, local_rank: int) -> torch.device:
    """asked: auto, cpu or cuda."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device is 'cuda', but torch finds no GPU; use train.device=cpu")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def pick_backend(device: torch.device, local_size: int) -> str:
    """NCCL where every rank has a GPU of its own."""
    if device.type == "cpu" or local_size > torch.cuda.device_count():
        return "gloo"
    return "nccl"


def pick_dtype(asked: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on GPUs, float32 on CPUs."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, auto if asked == "auto" else asked)
    assert isinstance(dtype, torch.dtype)
    return dtype


def prefer_blas(device: torch.device, dtype: torch.dtype, machine: str) -> None:
    """Disables oneDNN where it costs more than it saves. machine: the CPU's architecture.

    On aarch64 torch hands every linear layer in float32 to oneDNN, which sets up each new shape:
    131×128 by 128×128 took 0.65 ms the first time on a Neoverse N1, 0.2 ms later, and packed
    micro-batches bring new shapes all the time. Half precision stays with oneDNN, since some of
    these CPUs have instructions for it.
    """
    if device.type == "cpu" and machine in ("aarch64", "arm64") and dtype.itemsize >= 4:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


@contextmanager
def preferred_blas(device: torch.device, dtype: torch.dtype, machine: str) -> Iterator[None]:
    """prefer_blas for a while."""
    before = torch.backends.mkldnn.enabled
    prefer_blas(device, dtype, machine)
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def memory_bytes(device: torch.device, local_size: int) -> int:
    """Memory of one rank: its share of the GPU, or of the machine's memory on a CPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total // -(-local_size // torch.cuda.device_count()))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_size


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The vendor's dense FLOPs per second of one rank, of which its MFU is a share; or None."""
    if device.type != "cuda":
        return None
    return vendor_peak(torch.cuda.get_device_name(device), str(dtype).removeprefix("torch."))
