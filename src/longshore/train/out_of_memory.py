"""Out of GPU memory, in one line: where in the step, what is in memory, what to change.

In: torch's error and the rank's status. Out: a text such as

    is out of GPU memory in step 12, round 2, backward: 16,384 tokens, and 2.00 GiB more did not
    fit; parameters 14.0 GiB, gradients 14.0, optimizer 28.0, activations and the rest 21.3; lower …
"""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from longshore.batch import MicroBatch
from longshore.parallel.fsdp import shard_rows
from longshore.train.heartbeat import RankStatus

GIB = 2**30
WAY_OUT = (
    "lower plan.capacity, or set train.recompute=blocks or parallel.shard=zero3, or use more ranks"
)


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
    tokens = [_tokens(batch) for batch in batches]
    count = tokens[status.round - 1] if status.round else max(tokens, default=0)
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    more = f", and {asked[1]} more did not fit" if asked else ""
    parts = ", ".join(f"{name} {bytes_ / GIB:.1f} GiB" for name, bytes_ in _parts(optimizer))
    return f"is out of GPU memory in {where}: {count:,} tokens{more}; {parts}; {WAY_OUT}"


def _tokens(batch: MicroBatch) -> int:
    return 0 if batch.token_ids is None else len(batch.token_ids)


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
    return sum(shard_rows(tensor.detach())[0].nbytes for tensor in tensors)
