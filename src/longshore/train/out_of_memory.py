"""Out of GPU memory, in one line: where in the step, what is in memory, what to change.

In: torch's error and the rank's status. Out: a text such as

    is out of GPU memory in step 12, round 2 of 3, backward: 16,384 tokens, 12,288 of them its part
    of a pack of 98,304 that 8 ranks share, and 2.00 GiB more did not fit; parameters 14.0 GiB,
    gradients 14.0 GiB, optimizer 28.0 GiB, activations and the rest 21.3 GiB; lower plan.capacity …

A layer gathers what it reads of a shared pack, so its size counts beside the rank's own tokens.
"""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from longshore.batch import MicroBatch, PackContext
from longshore.parallel.fsdp import local_part
from longshore.train.heartbeat import RankStatus

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
    batch = _in_memory(status, batches)
    tokens = "no tokens" if batch is None else f"{batch.ctx.tokens:,} tokens"
    shared = () if batch is None else tuple(p for p in batch.ctx.packs if p.group.cp_size > 1)
    gathered = "".join(f", {_gathered(pack)}" for pack in shared)
    way_out = WAY_OUT + (SMALLER_PACKS if shared else "")
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    more = f", and {asked[1]} more did not fit" if asked else ""
    parts = ", ".join(f"{name} {bytes_ / GIB:.1f} GiB" for name, bytes_ in _parts(optimizer))
    return f"is out of GPU memory in {where}: {tokens}{gathered}{more}; {parts}; {way_out}"


def _in_memory(status: RankStatus, batches: Sequence[MicroBatch]) -> MicroBatch | None:
    """The micro-batch of the round; outside of rounds the largest, None before there are any."""
    if status.round and batches:
        return batches[status.round - 1]
    return max(batches, key=lambda batch: batch.ctx.tokens, default=None)


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
    parts = [
        ("parameters", _bytes(parameters)),
        ("gradients", _bytes(gradients)),
        ("optimizer", _bytes(moments)),
    ]
    device = next((tensor.device for tensor in parameters), torch.device("cpu"))
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
        rest = used - sum(size for _, size in parts)
        total = torch.cuda.get_device_properties(device).total_memory
        parts += [("activations and the rest", rest), ("the whole GPU", total)]
    return parts


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor.detach()).nbytes for tensor in tensors)
