"""The optimizer: AdamW, the learning rate of a step, and clipping by the true global norm.

In: a model whose parameters may be split over the lanes. Out: updated parameters.

    schedule cosine, lr 1, warmup 10, 110 updates, min_lr 0.1:
    update 0 → 0.1, 9 → 1.0, 10 → 1.0, 60 → 0.55, 110 → 0.1
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Topology
from longshore.model.norm import Float32Parameters
from longshore.parallel.fsdp import is_split

ScheduleName = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """warmup: updates until the full rate. min_lr: the share of it at the end, after `updates`."""

    kind: ScheduleName
    lr: float
    warmup: int
    updates: int
    min_lr: float

    def at(self, update: int) -> float:
        """The rate of an update, counted from 0."""
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        if self.kind == "constant":
            return self.lr
        done = min(1.0, (update - self.warmup) / max(1, self.updates - self.warmup))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.min_lr + (1 - self.min_lr) * left)


def make_optimizer(
    model: nn.Module, *, weight_decay: float, betas: tuple[float, float], eps: float
) -> AdamW:
    """AdamW, fused; the rate is set before each update.

    Norms, biases and other vectors do not decay, nor do parameters that are kept in float32, such
    as those of routers.
    """
    uncast = [part for part in model.modules() if isinstance(part, Float32Parameters)]
    kept = {parameter for part in uncast for parameter in part.parameters()}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        (others if parameter.dim() < 2 or parameter in kept else decaying).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def set_lr(optimizer: AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip(model: nn.Module, limit: float, topology: Topology, *, also: Tensor) -> Tensor:
    """Scales the gradients down to a global norm of `limit` (0: never), and returns the norm.

    also: float64 numbers (N) to be summed over the lanes in the same collective, in place. No
    branch reads the norm, so nothing waits for the device.
    """
    split: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        (split if is_split(parameter) else whole).append(_local(parameter.grad))
    sums = sum_over(torch.cat([_square(split, also), also]), topology.groups.lanes)
    also.copy_(sums[1:])
    norm = (sums[:1] + _square(whole, also)).sqrt().squeeze()
    if limit:
        gradients = [*split, *whole]
        scale = (limit / norm).clamp(max=1.0).to(gradients[0].dtype)
        torch._foreach_mul_(gradients, scale)
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _square(gradients: list[Tensor], like: Tensor) -> Tensor:
    """The square of the norm of all together, (1), in the dtype of `like`."""
    if not gradients:
        return like.new_zeros(1)
    return get_total_norm(gradients).to(like.dtype).square().view(1)
