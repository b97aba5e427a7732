"""Mamba2 as a mixer: project, scan (convolution and state-space scan), gated norm, project.

In: hidden states (T, C) and the context. Out: (T, C). Parameters are named and laid out as in
Hugging Face's Mamba2 and Nemotron-H, but for per_head.{A_log, dt_bias, D}, which are directly in
the mixer there. in_proj gives the gate z, then x, B and C, which are convolved, then a step dt of
each head; steps are softplus(dt + dt_bias) within the config's limits.

T tokens, H heads of width P, G groups, N width of the state. With 4 heads of 8, 2 groups and a
state of 16, in_proj gives 32 + (32 + 32 + 32) + 4 = 132 channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from longshore.arch.part import Norm
from longshore.arch.scan import Mamba2Config
from longshore.batch import SeqContext
from longshore.model.fill import CONV, ONES, RESIDUAL, Fill
from longshore.model.interface import LOCAL, Exchanges, Rows, ThreeStepMixer
from longshore.model.norm import NormAfterGate
from longshore.model.rope import Tables
from longshore.model.scan import Decay, ScanInputs, conv_taps, copied, scan_packs
from longshore.ops.boundaries import Bounds
from longshore.ops.ssd import SSD, prepare_ssd


@dataclass(frozen=True, slots=True)
class Mamba2Scan:
    """dt_min, dt_max: limits of a step."""

    dt_min: float
    dt_max: float | None

    def prepare(
        self,
        parts: tuple[Tensor, ...],
        gates: tuple[Tensor, ...],
        per_head: tuple[Tensor, ...],
        *,
        bounds: Bounds | None,
    ) -> SSD:
        x_THP, B_TGN, C_TGN = parts
        (dt_TH,) = gates
        A_H, dt_bias_H, D_H = per_head
        step_TH = softplus(dt_TH + dt_bias_H).clamp(self.dt_min, self.dt_max)
        return prepare_ssd(x_THP, step_TH, A_H, B_TGN, C_TGN, D_H=D_H, bounds=bounds)

    def compose(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition[..., None, None] * state


class DecayAndSkip(Decay):
    """With D, the share of x that reaches a head's output directly."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.D = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return *super().forward(x), copied(self.D)


class Mamba2(ThreeStepMixer):
    """exchanges: how the lane reaches rows of shared packs; set by parallel/apply.py."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "conv1d.weight": CONV,
        **{f"per_head.{name}": fill for name, fill in Decay.FILLS.items()},
        "per_head.D": ONES,
        "norm.weight": ONES,
        "out_proj.weight": RESIDUAL,
    }

    def __init__(self, config: Mamba2Config, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.exchanges: Exchanges = LOCAL
        self.scan = Mamba2Scan(config.dt_min, config.dt_max)
        self.in_proj = nn.Linear(width, config.projected, bias=config.bias)
        self.conv1d = conv_taps(config.conv_dim, config.kernel, bias=config.conv_bias)
        self.per_head = DecayAndSkip(config.heads)
        self.norm = NormAfterGate(config.inner, config.norm_groups or config.groups, norm.eps)
        self.out_proj = nn.Linear(config.inner, width, bias=config.bias)

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        config = self.config
        sizes = [config.inner, config.conv_dim, config.heads]
        z_TX, mixed_TX, dt_TH = self.in_proj(x_TC).split(sizes, dim=-1)
        return (mixed_TX, dt_TH), (z_TX,)

    def apart(self, x: Tensor) -> Rows:
        per_head: Rows = self.per_head(x)
        return per_head

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Tensor:
        config, (mixed_TX, dt_TH) = self.config, rows
        group = (config.groups, config.state_dim)
        inputs = ScanInputs(
            mixed=mixed_TX,
            parts=((config.heads, config.head_dim), group, group),
            gates=(dt_TH,),
            taps=self.conv1d.weight[:, 0],
            bias=self.conv1d.bias,
            per_head=apart,
        )
        return scan_packs(inputs, ctx, scan=self.scan, exchanges=self.exchanges)

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        (z_TX,) = kept
        output_TC: Tensor = self.out_proj(self.norm(mixed.flatten(-2), z_TX))
        return output_TC
