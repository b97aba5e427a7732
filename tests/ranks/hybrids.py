"""Decoders that join many kinds of layers, small enough for exact tests."""

from dataclasses import replace

from tests.ranks.spine import VOCAB

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.rope import RopeConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config

EXPERTS = MoEConfig(
    experts=6, top_k=2, width=8, shared_width=6, shared_gate=True, bias_update=1e-3, aux_weight=0.1
)


def hybrid(experts: int = 6) -> DecoderConfig:
    """Attention, delta net and Mamba2, experts, one depth of multi-token prediction."""
    moe = replace(EXPERTS, experts=experts)
    rope = RopeConfig(rotary_dim=4)
    attention = AttentionConfig(heads=4, kv_heads=4, head_dim=8, rope=rope, qk_norm=True, gate=True)
    delta = DeltaNetConfig(key_heads=4, value_heads=4, key_dim=4, value_dim=6)
    mamba = Mamba2Config(heads=4, head_dim=4, state_dim=6, groups=2)
    return DecoderConfig(
        vocab_size=VOCAB,
        width=16,
        layers=(
            LayerConfig(delta, MLPConfig(width=24)),
            LayerConfig(mamba, None),
            LayerConfig(attention, moe),
        ),
        mtp=(LayerConfig(attention, moe),),
        zero_centred=True,
        init_std=0.3,
    )


def deepseek() -> DecoderConfig:
    """Latent attention, a dense layer and one of experts, two depths."""
    mla = MLAConfig(heads=4, q_rank=10, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5)
    experts = MoEConfig(
        experts=8,
        top_k=2,
        width=8,
        score="sigmoid",
        groups=4,
        top_groups=2,
        scale=1.5,
        shared_width=6,
        bias_update=1e-3,
        aux_weight=0.1,
    )
    return DecoderConfig(
        vocab_size=VOCAB,
        width=16,
        layers=(LayerConfig(mla, MLPConfig(width=24)), LayerConfig(mla, experts)),
        mtp=(LayerConfig(mla, experts), LayerConfig(mla, MLPConfig(width=16))),
        init_std=0.3,
    )


HYBRIDS = {"hybrid": hybrid, "deepseek": deepseek}
