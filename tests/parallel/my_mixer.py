"""A mixer of one file: each token sees the mean of its sequence so far."""

from dataclasses import dataclass

import torch
from torch import nn

from longshore.arch.part import Saved
from longshore.model.opaque import opened
from longshore.model.whole import local_packs
from longshore.parallel.apply import register_mixer
from longshore.parallel.context.whole import WholePacks


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


def running_mean(x, bounds):
    """Over joined sequences; it must keep them apart."""
    parts = [x[start:stop] for start, stop in bounds.pairs()]
    counts = [torch.arange(1, len(part) + 1, device=x.device)[:, None] for part in parts]
    return torch.cat([part.cumsum(0) / n for part, n in zip(parts, counts, strict=True)])


class Mean(nn.Module):
    """Project, meet, and the block adds it up."""

    def __init__(self, config, width, *, norm):
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        self.core = local_packs

    def forward(self, x_TC, ctx, tables):
        return self._meet(self.proj(x_TC), ctx)

    @torch.compiler.disable
    def _meet(self, x_TC, ctx):
        return self.core(running_mean, x_TC, opened(ctx))


register_mixer(MeanConfig, Mean, core=lambda groups, choices: WholePacks(groups))
