"""One layer: x + mixer(norm(x)), then x + mlp(norm(x)); either may be left out with its norm.

In: hidden states (T, C), the context, the rotary tables. Out: hidden states (T, C) and, where the
feed-forward part is made of experts, what they did. A block whose o_proj and down_proj are zero
gives back what came in. Hidden states may be wider than the weights (DecoderConfig's
float32_residual): norms and parts then compute in the weights' dtype, and the sums are as wide.

    block.compile(dynamic=True)     once for all packs; the core stays as it is
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longshore.arch.decoder import LayerConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.model.interface import Context, Opaque, Output
from longshore.model.norm import RMSNorm
from longshore.model.registry import make_feed_forward, make_mixer
from longshore.model.rope import Tables


class Block(nn.Module):
    def __init__(self, config: LayerConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self._compiled: Callable[[Tensor, Context, Tables], Output] | None = None
        self.mixer_norm = self.mixer = self.mlp_norm = self.mlp = None
        if config.mixer is not None:
            self.mixer_norm = RMSNorm(width, norm)
            self.mixer = make_mixer(config.mixer, width, norm=norm)
        if config.mlp is not None:
            self.mlp_norm = RMSNorm(width, norm)
            self.mlp = make_feed_forward(config.mlp, width, norm=norm)

    def forward(self, x_TC: Tensor, ctx: SeqContext, tables: Tables) -> Output:
        if self._compiled is not None:
            return self._compiled(x_TC, Opaque(ctx), tables)
        return self._run(x_TC, ctx, tables)

    def compile(self, **options: Any) -> None:  # noqa: ANN401
        """Compiles what the block does, with options of torch.compile; hooks stay outside."""
        self._compiled = torch.compile(self._run, **options)

    def _run(self, x_TC: Tensor, ctx: Context, tables: Tables) -> Output:
        if self.mixer is not None and self.mixer_norm is not None:
            normed_TC = self.mixer_norm(x_TC.to(self.mixer_norm.weight.dtype))
            x_TC = x_TC + self.mixer(normed_TC, ctx, tables)
        if self.mlp is not None and self.mlp_norm is not None:
            normed_TC = self.mlp_norm(x_TC.to(self.mlp_norm.weight.dtype))
            out_TC, routed = self.mlp(normed_TC, ctx)
            return Output(x_TC + out_TC, () if routed is None else (routed,))
        return Output(x_TC, ())
