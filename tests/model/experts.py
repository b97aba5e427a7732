"""Layers of experts of several kinds, in float64, for tests."""

import torch

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Norm
from longshore.model.feed_forward import MoE

WIDTH = 12
LENGTHS = (1, 2, 7, 33, 1, 90)
KINDS = {
    "softmax": MoEConfig(experts=6, top_k=2, width=8, aux_weight=0.1),
    "one": MoEConfig(experts=5, top_k=1, width=4, normalise=False, aux_weight=0.2),
    "gated": MoEConfig(
        experts=6, top_k=3, width=8, shared_width=7, shared_gate=True, aux_weight=0.1
    ),
    "sigmoid": MoEConfig(experts=4, top_k=2, width=4, score="sigmoid", scale=1.5, aux_weight=0.3),
    "groups": MoEConfig(
        experts=12,
        top_k=3,
        width=4,
        score="sigmoid",
        groups=4,
        top_groups=2,
        scale=2.5,
        shared_width=5,
        bias_update=1e-3,
        aux_weight=0.4,
    ),
}


def make(config: MoEConfig, *, seed: int = 0, width: int = WIDTH) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(config, width, norm=Norm(1e-6)).double()
    with torch.no_grad():
        moe.router.weight *= 3
        if config.bias:
            moe.router.bias += torch.randn(config.experts) / 3
    return moe


def rows(lengths=LENGTHS, *, width: int = WIDTH) -> torch.Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(sum(lengths), width, generator=draws, dtype=torch.float64)


def one_layer(config: MoEConfig) -> DecoderConfig:
    attention = AttentionConfig(heads=2, kv_heads=1, head_dim=4)
    return DecoderConfig(vocab_size=31, width=WIDTH, layers=(LayerConfig(attention, config),))
