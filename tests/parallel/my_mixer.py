"""A mixer of one file: each token sees the mean of its sequence so far."""

from dataclasses import dataclass

import torch
from torch import nn

from longshore.arch.part import Saved
from longshore.model.interface import LOCAL, eager, over_packs
from longshore.model.registry import register_mixer


@dataclass(frozen=True, slots=True)
class MeanConfig:
    """What it costs, so that FLOPs and memory are counted; see arch/part.py."""

    ropes = ()

    def parameters(self, width):
        return width * width

    def flops(self, width, length):
        return 2 * length * width * width

    def saved(self, width):
        return Saved(width)

    def gathered(self):
        return 0

    def shared_heads(self, sharing):
        return ()


class Mean(nn.Module):
    """Project and mix; the block adds the result to the residual stream."""

    def __init__(self, config, width, *, norm):
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        self.exchanges = LOCAL

    def forward(self, x_TC, ctx, tables):
        return self._mix(self.proj(x_TC), ctx)

    @eager
    def _mix(self, x_TC, ctx):
        return over_packs(mean_of_pack, ctx, self.exchanges, x_TC)


def mean_of_pack(exchange, x_TC):
    """Gathers a pack that lanes share, and keeps this lane's rows of the result."""
    return exchange.shard(running_mean(exchange.gather(x_TC), exchange.pack.padded))


def running_mean(x, bounds):
    """Over joined sequences; it must keep them apart."""
    parts = [x[start:stop] for start, stop in bounds.pairs()]
    counts = [torch.arange(1, len(part) + 1, device=x.device)[:, None] for part in parts]
    return torch.cat([part.cumsum(0) / n for part, n in zip(parts, counts, strict=True)])


register_mixer(MeanConfig, Mean)
