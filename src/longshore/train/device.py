"""The device of a rank: which one, its process group backend, dtype, memory and peak.

In: what the user asked for and the rank's local rank. Out: a torch device and facts about it. Two
ranks on a machine with one GPU share it and use gloo, because NCCL allows one rank per GPU.

When its memory is full, one line tells where in the step, what is in memory and what to change:

    is out of GPU memory in step 12, round 2 of 3, backward: 16,384 tokens, 12,288 of them its part
    of a pack of 98,304 that 8 ranks share, and 2.00 GiB more did not fit; parameters 14.0 GiB,
    gradients 14.0 GiB, optimizer 28.0 GiB, activations and the rest 21.3 GiB; lower plan.capacity …

A layer gathers what it reads of a shared pack, so its size counts beside the rank's own tokens.
"""

import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from longshore.arch.costs import vendor_peak
from longshore.batch import MicroBatch, PackContext
from longshore.parallel.fsdp import local_part
from longshore.train.supervision import RankStatus


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


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this rank: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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


GIB = 2**30
WAY_OUT = (
    "lower plan.capacity, or set train.recompute=blocks or parallel.shard=zero3, or use more ranks"
)
SMALLER_PACKS = ", or lower plan.max_cp or plan.cp_size, so that fewer ranks share a pack"


def out_of_memory(
    error: torch.OutOfMemoryError,
    status: RankStatus,
    batches: Sequence[MicroBatch],
    *,
    optimizer: Optimizer,
) -> str:
    """batches: of the step, one for each round."""
    step = [f"step {status.step}"] if status.step else []
    rounds = [f"round {status.round} of {len(batches)}"] if status.round else []
    where = ", ".join([*step, *rounds, status.phase])
    # Outside of rounds the largest micro-batch counts; before the first there is none.
    now = [batches[status.round - 1]] if status.round and batches else batches
    batch = max(now, key=lambda batch: batch.ctx.tokens, default=None)
    tokens = "no tokens" if batch is None else f"{batch.ctx.tokens:,} tokens"
    shared = () if batch is None else tuple(p for p in batch.ctx.packs if p.group.cp_size > 1)
    gathered = "".join(f", {_gathered(pack)}" for pack in shared)
    way_out = WAY_OUT + (SMALLER_PACKS if shared else "")
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    more = f", and {asked[1]} more did not fit" if asked else ""
    parts = ", ".join(f"{name} {bytes_ / GIB:.1f} GiB" for name, bytes_ in _parts(optimizer))
    return f"is out of GPU memory in {where}: {tokens}{gathered}{more}; {parts}; {way_out}"


def _gathered(pack: PackContext) -> str:
    own, whole = pack.stop - pack.start, pack.padded.offsets[-1]
    return f"{own:,} of them its part of a pack of {whole:,} that {pack.group.cp_size} ranks share"


def _parts(optimizer: Optimizer) -> list[tuple[str, int]]:
    """What is in this rank's memory, in bytes; on a GPU with activations and the total.

    Parameters are read from the optimizer: during a step modules hold gathered ones instead.
    """
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    states = optimizer.state.values()
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    named = (("parameters", parameters), ("gradients", gradients), ("optimizer", moments))
    parts = [
        (name, sum(local_part(tensor.detach()).nbytes for tensor in tensors))
        for name, tensors in named
    ]
    device = next((tensor.device for tensor in parameters), torch.device("cpu"))
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
        rest = used - sum(size for _, size in parts)
        total = torch.cuda.get_device_properties(device).total_memory
        parts += [("activations and the rest", rest), ("the whole GPU", total)]
    return parts
