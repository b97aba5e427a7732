"""Gated delta net as a mixer: project, scan (convolution and delta rule), gated norm, project.

In: hidden states (T, C) and the context. Out: (T, C). Parameters are named and laid out as in
Hugging Face's Qwen3-Next, but for per_head.{A_log, dt_bias}, which are directly in the mixer
there. A key head's rows of in_proj_qkvz are its q and k, then v and z of the value heads it serves;
those of in_proj_ba their b and a. Queries and keys have length 1; a head forgets by
exp(−exp(A_log)·softplus(a + dt_bias)) and learns by sigmoid(b).

T tokens, R key heads of width K, H value heads of width V. With 2 key heads of 8 and 4 value heads
of 6, in_proj_qkvz gives 2·(8 + 8 + 12 + 12) = 80 channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from longshore.arch.part import Norm
from longshore.arch.scan import DeltaNetConfig
from longshore.batch import SeqContext
from longshore.model.fill import CONV, ONES, RESIDUAL, Fill
from longshore.model.interface import LOCAL, Exchanges, Rows, ThreeStepMixer
from longshore.model.norm import NormBeforeGate
from longshore.model.rope import Tables
from longshore.model.scan import Decay, Prepared, ScanInputs, conv_taps, scan_packs
from longshore.ops.boundaries import Bounds
from longshore.ops.delta_rule import prepare_heads


@dataclass(frozen=True, slots=True)
class DeltaScan:
    def prepare(
        self,
        parts: tuple[Tensor, ...],
        gates: tuple[Tensor, ...],
        per_head: tuple[Tensor, ...],
        *,
        bounds: Bounds | None,
    ) -> Prepared:
        q_TRK, k_TRK, v_THV = parts
        b_TH, a_TH = gates
        A_H, dt_bias_H = per_head
        g_TH = A_H * softplus(a_TH + dt_bias_H)
        beta_TH = b_TH.to(g_TH.dtype).sigmoid()
        return prepare_heads(q_TRK, k_TRK, v_THV, g_TH, beta_TH, bounds=bounds)

    def compose(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition @ state


class DeltaNet(ThreeStepMixer):
    """exchanges: how the lane reaches rows of shared packs; set by parallel/apply.py."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "conv1d.weight": CONV,
        **{f"per_head.{name}": fill for name, fill in Decay.FILLS.items()},
        "norm.weight": ONES,
        "out_proj.weight": RESIDUAL,
    }

    def __init__(self, config: DeltaNetConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.exchanges: Exchanges = LOCAL
        self.scan = DeltaScan()
        self.in_proj_qkvz = nn.Linear(width, config.conv_dim + config.values, bias=False)
        self.in_proj_ba = nn.Linear(width, 2 * config.value_heads, bias=False)
        self.conv1d = conv_taps(config.conv_dim, config.kernel, bias=False)
        self.per_head = Decay(config.value_heads)
        self.norm = NormBeforeGate(config.value_dim, norm.eps)
        self.out_proj = nn.Linear(config.values, width, bias=False)

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        config = self.config
        served = config.value_heads // config.key_heads
        keys, values = config.key_dim, served * config.value_dim
        qkvz_TRX = self.in_proj_qkvz(x_TC).unflatten(-1, (config.key_heads, -1))
        *qkv, z_TRX = qkvz_TRX.split([keys, keys, values, values], dim=-1)
        ba_TRX = self.in_proj_ba(x_TC).unflatten(-1, (config.key_heads, -1))
        b_TH, a_TH = (part.flatten(-2) for part in ba_TRX.chunk(2, dim=-1))
        mixed_TX = torch.cat([part.flatten(-2) for part in qkv], dim=-1)
        return (mixed_TX, b_TH, a_TH), (z_TRX,)

    def apart(self, x: Tensor) -> Rows:
        per_head: Rows = self.per_head(x)
        return per_head

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Tensor:
        config, (mixed_TX, b_TH, a_TH) = self.config, rows
        key = (config.key_heads, config.key_dim)
        inputs = ScanInputs(
            mixed=mixed_TX,
            parts=(key, key, (config.value_heads, config.value_dim)),
            gates=(b_TH, a_TH),
            taps=self.conv1d.weight[:, 0],
            bias=None,
            per_head=apart,
        )
        return scan_packs(inputs, ctx, scan=self.scan, exchanges=self.exchanges)

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        (z_TRX,) = kept
        normed_THV = self.norm(mixed, z_TRX.reshape(mixed.shape))
        output_TC: Tensor = self.out_proj(normed_THV.flatten(-2))
        return output_TC
