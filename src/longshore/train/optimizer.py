"""The optimizer: AdamW, its learning rate, clipping by the global norm, and the experts' bias.

In: a model whose parameters may be sharded over the lanes. Out: updated parameters.

    schedule cosine, lr 1, warmup 10, 110 updates, min_lr 0.1:
    update 0 → 0.1, 9 → 1.0, 10 → 1.0, 60 → 0.55, 110 → 0.1

A router's bias balances how many tokens each expert gets, without a loss. After each step it moves
by its config's bias_update, up for experts with fewer tokens than the mean, down for those with
more; tokens are counted over all lanes, so the biases stay the same on all of them:

    4 experts with 10, 2, 6 and 6 tokens, bias_update 0.001: −0.001, +0.001, 0 and 0
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from longshore.arch.decoder import DecoderConfig
from longshore.arch.memory import stage_layers
from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Topology
from longshore.model.feed_forward import MoE
from longshore.model.interface import Routed
from longshore.model.norm_rope import Float32Parameters
from longshore.parallel.fsdp import local_part
from longshore.parallel.shards import counted_part, trained_parameters
from longshore.plan.layout import Layout
from longshore.settings import ScheduleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate of each update."""

    kind: ScheduleName
    """How the rate falls after the warm-up."""
    lr: float
    """The full rate."""
    warmup: int
    """Updates until the full rate."""
    updates: int
    """Updates until the last rate."""
    min_lr: float
    """The last rate, as a fraction of the full one."""

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
    """Fused AdamW; the rate is set before each update.

    No weight decay for norms, biases and other vectors, nor for parameters that stay in float32,
    such as those of routers.
    """
    uncast = [module for module in model.modules() if isinstance(module, Float32Parameters)]
    float32 = {parameter for module in uncast for parameter in module.parameters()}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        (others if parameter.dim() < 2 or parameter in float32 else decaying).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def clip(
    model: nn.Module,
    limit: float,
    topology: Topology,
    *,
    also: Tensor,
    counted: Iterable[nn.Parameter] | None = None,
) -> Tensor:
    """Scales the gradients down to a global norm of `limit` (0: never), and returns the norm.

    also: float64 (N), summed over all ranks in place, in the same collective.
    counted: the parameters whose gradients the norm counts on this rank; default: all. No branch
    reads the norm, so the host does not wait for the device.
    """
    chosen = None if counted is None else {id(parameter) for parameter in counted}
    mine: list[Tensor] = []
    for parameter, cut in trained_parameters(model):
        assert parameter.grad is not None, "a trained parameter got no gradient"
        if chosen is None or id(parameter) in chosen:
            mine += counted_part(parameter.grad, cut, topology)
    square = get_total_norm(mine).to(also.dtype).square().view(1) if mine else also.new_zeros(1)
    sums = sum_over(torch.cat([square, also]), topology.groups.world)
    also.copy_(sums[1:])
    norm = sums[:1].sqrt().squeeze()
    if limit:
        gradients = [
            local_part(parameter.grad)
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        if gradients:  # nothing of a pipeline rank may be trained
            scale = (limit / norm).clamp(max=1.0).to(gradients[0].dtype)
            torch._foreach_mul_(gradients, scale)
    return norm


class RoutingCounts:
    """Tokens routed to each expert, by MoE layer, summed over this lane's rounds on the device."""

    def __init__(self) -> None:
        self.stages: dict[int, list[Tensor]] = {}

    @property
    def layers(self) -> list[Tensor]:
        """Counts of all MoE layers on this rank."""
        return [layer for number in sorted(self.stages) for layer in self.stages[number]]

    def add(self, routed: Sequence[Routed], stage: int = 0) -> None:
        """Adds one round's forward; recomputation and evaluation are not counted."""
        counts = [layer.counts.to(torch.int64, copy=True) for layer in routed]
        totals = self.stages.setdefault(stage, counts)
        if totals is counts:
            return
        assert len(counts) == len(totals), "a round has other MoE layers than the first"
        for total, more in zip(totals, counts, strict=True):
            total += more

    def over_lanes(self, topology: Topology) -> tuple[Tensor, ...]:
        """The sums over all lanes, in one small collective; () without experts."""
        if not self.layers:
            return ()
        totals = sum_over(torch.cat(self.layers), topology.groups.lanes)
        sum_over(totals, topology.groups.tp)  # each routed its own share of the lane's rows
        return tuple(totals.split([len(layer) for layer in self.layers]))


def counts_of_all_stages(
    mine: Sequence[Tensor], config: DecoderConfig, layout: Layout, topology: Topology
) -> tuple[Tensor, ...]:
    """The counts of all layers of experts in the order of the model, on every pipeline rank.

    mine: those of this rank's stages. Every rank knows from the config where they belong.
    """
    if layout.pp == 1:
        return tuple(mine)
    own, layers = iter(mine), list[Tensor]()
    for number, stage in enumerate(layout.stages):
        for layer in stage_layers(config, stage):
            if experts := layer.mlp.routed_experts if layer.mlp is not None else 0:
                is_mine = layout.rank_of(number) == topology.pp_rank
                zeros = torch.zeros(experts, dtype=torch.int64, device=topology.device)
                layers.append(next(own) if is_mine else zeros)
    if not layers:
        return ()
    total = sum_over(torch.cat(layers), topology.groups.pp)
    return tuple(total.split([len(layer) for layer in layers]))


def update_bias(model: nn.Module, counts: Sequence[Tensor]) -> None:
    """Moves every router's bias once, after the rounds of a step; the same on all lanes.

    counts: tokens over all lanes, by MoE layer in the model's order.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    assert len(layers) == len(counts), "counts of some MoE layers are missing"
    for layer, counts_E in zip(layers, counts, strict=True):
        bias_E, step = layer.router.bias, layer.config.bias_update
        if step:
            assert bias_E is not None
            # In integers: mean − counts, times the number of experts.
            fewer_E = (counts_E.sum() - len(counts_E) * counts_E).sign()
            bias_E.add_(fewer_E.to(bias_E.dtype), alpha=step)
