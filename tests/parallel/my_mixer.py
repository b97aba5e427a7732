"""A mixer of one file: in each head a token sees the mean of its sequence so far."""

from dataclasses import dataclass

import torch
from torch import nn

from longshore.arch.attention import causal_pairs
from longshore.arch.cuts import TPUnits
from longshore.arch.part import Part, Product, Saved
from longshore.model.interface import ThreeStepMixer, over_packs
from longshore.model.registry import register_mixer
from longshore.ops.attention import attention


@dataclass(frozen=True, slots=True)
class MeanConfig(Part):
    """What it costs and how ranks share it; arch/part.py has more to say, with defaults."""

    heads: int = 4
    head_dim: int = 8

    graph_layer = "mean"  # CUDA graphs may replay it: graph.layers=mean, or all
    timed_as = "attention"  # whose kernels it runs, so their measured times predict its own

    @property
    def sizes(self):
        return self.head_dim, self.heads * self.head_dim

    def products(self, width):
        inner = self.heads * self.head_dim
        return Product(width, inner, "in_proj"), Product(inner, width, "out_proj")

    def parameters(self, width):
        return 2 * width * self.heads * self.head_dim

    def flops(self, width, length):
        pairs = causal_pairs(length)
        return 2 * length * self.parameters(width) + 4 * self.heads * self.head_dim * pairs

    def saved(self, width):
        """Scores of 0, values and their means."""
        return Saved(3 * self.heads * self.head_dim, self.heads)

    def gathered(self):
        return self.heads * self.head_dim

    def tp_units(self):
        return (TPUnits("heads", "heads of the mean", self.heads),)

    def tp_cuts(self, width, at):
        return {
            "in_proj.weight": at.of(self.heads, self.head_dim),
            "out_proj.weight": at.of(self.heads, self.head_dim, dim=1),
        }


class Mean(ThreeStepMixer):
    """Project, mix, project; the block adds the result to the residual stream."""

    def __init__(self, config, width, *, norm):
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.out_proj = nn.Linear(config.heads * config.head_dim, width, bias=False)

    def before(self, x_TC, tables):
        return (self.in_proj(x_TC).unflatten(-1, (self.config.heads, -1)),), ()

    def core(self, ctx, apart, *rows):
        return over_packs(mean_of_pack, ctx, self.exchanges, *rows)

    def after(self, mixed, *kept):
        return self.out_proj(mixed.flatten(-2))


def mean_of_pack(exchange, x_THD):
    """Gathers a pack that lanes share, and keeps this lane's rows of the result.

    Attention with equal scores is a mean. It keeps joined sequences apart, and on a GPU it reads
    their boundaries there, as CUDA graphs need it.
    """
    all_NHD = exchange.gather(x_THD)
    equal_NHD = torch.zeros_like(all_NHD)
    return exchange.shard(attention(equal_NHD, equal_NHD, all_NHD, bounds=exchange.pack.padded))


register_mixer(MeanConfig, Mean)
