"""Multi-token prediction: modules after the decoder, one after the other, as in DeepSeek-V3.

In: the normed hidden states (T, C) that the head saw at the depth before, and the embeddings (T, C)
of the tokens d places on. Out: normed hidden states, for the head and for the next depth. That is
how the weights of DeepSeek-V3 are used: what follows the decoder's last norm goes in. Embedding and
head are the decoder's own. The tokens d places on were picked while sequences were
whole (data/pack.py), so nothing is shifted here, and lanes exchange no tokens.

At depth 1 position 3 joins its state with the embedding of token 4 and predicts token 5. Position 5
of a sequence of 6 has no token to join: it runs along, and no loss, no expert and no count of
theirs sees it. What comes out there is of no use, and nothing causal looks at it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from longshore.arch.decoder import LayerConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.model.block import Block
from longshore.model.interface import Output
from longshore.model.norm import RMSNorm
from longshore.model.rope import Tables


class MTPDepth(nn.Module):
    """One depth: both inputs normed and joined, a projection, a block, a norm. depth: from 1."""

    def __init__(self, layer: LayerConfig, width: int, *, depth: int, norm: Norm) -> None:
        super().__init__()
        self.depth = depth
        self.embed_norm = RMSNorm(width, norm)
        self.hidden_norm = RMSNorm(width, norm)
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.block = Block(layer, width, norm=norm)
        self.norm = RMSNorm(width, norm)

    def compile(self, **options: Any) -> None:  # noqa: ANN401
        """Compiles its block; the rest is small."""
        self.block.compile(**options)

    def forward(
        self, hidden_TC: Tensor, embedded_TC: Tensor, ctx: SeqContext, tables: Tables
    ) -> Output:
        both = torch.cat([self.embed_norm(embedded_TC), self.hidden_norm(hidden_TC)], dim=-1)
        hidden_TC, routed, _ = self.block(self.proj(both), ctx.ahead(self.depth), tables)
        here = tuple(layer._replace(depth=self.depth) for layer in routed)
        return Output(self.norm(hidden_TC), here)
