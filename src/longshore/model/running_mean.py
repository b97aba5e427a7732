"""A mixer in which each head sees the mean of its sequence so far: attention with equal scores.

In: hidden states (T, C), the context. Out: (T, C). A lane that shares a pack gathers all of it. The
third token of a sequence has a third of each of the first three.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from longshore.arch.part import Norm
from longshore.arch.running_mean import RunningMeanConfig
from longshore.batch import SeqContext
from longshore.model.fill import RESIDUAL, Fill
from longshore.model.interface import (
    LOCAL,
    Exchange,
    Exchanges,
    Rows,
    ThreeStepMixer,
    over_packs,
)
from longshore.model.rope import Tables
from longshore.ops.attention import attention


class RunningMean(ThreeStepMixer):
    """exchanges: how the lane reaches rows of shared packs; set by parallel/apply.py."""

    FILLS: ClassVar[Mapping[str, Fill]] = {"out_proj.weight": RESIDUAL}

    def __init__(self, config: RunningMeanConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.exchanges: Exchanges = LOCAL
        self.in_proj = nn.Linear(width, config.inner, bias=False)
        self.out_proj = nn.Linear(config.inner, width, bias=False)

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        return (self.in_proj(x_TC).unflatten(-1, (self.config.heads, -1)),), ()

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Tensor:
        return over_packs(_mean, ctx, self.exchanges, *rows)

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        output_TC: Tensor = self.out_proj(mixed.flatten(-2))
        return output_TC


def _mean(exchange: Exchange, x_THD: Tensor) -> Tensor:
    all_NHD = exchange.gather(x_THD)
    equal_NHD = torch.zeros_like(all_NHD)
    return exchange.shard(attention(equal_NHD, equal_NHD, all_NHD, bounds=exchange.pack.padded))
