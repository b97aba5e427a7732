"""How presets describe a decoder: by a few numbers, or by a pattern of layers. Torch-free.

In: numbers. Out: a DecoderConfig.

    Dense(layers=2, width=64, heads=4, …).config()               two layers, alike
    Patterned(layers=5, first=(a,), pattern=(b, c), …).config()  layers a b c b c
"""

from dataclasses import dataclass

from longshore.model.config import (
    MOST_LAYERS,
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
)
from longshore.model.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A decoder whose layers are all alike: attention, then SwiGLU of `mlp` channels."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab_size: int
    tied: bool
    norm_eps: float
    rope: RopeConfig
    qk_norm: bool = False
    bias: bool = False
    window: int | None = None
    init_std: float = 0.02

    def config(self) -> DecoderConfig:
        _check_layers(self.layers)
        attention = AttentionConfig(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            qk_norm=self.qk_norm,
            bias=self.bias,
            window=self.window,
        )
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            layers=(LayerConfig(attention, MLPConfig(width=self.mlp)),) * self.layers,
            norm_eps=self.norm_eps,
            tied=self.tied,
            init_std=self.init_std,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterned:
    """A decoder whose layers are `first`, then `pattern` again and again; `layers` of them."""

    layers: int
    width: int
    vocab_size: int
    pattern: tuple[LayerConfig, ...]
    first: tuple[LayerConfig, ...] = ()
    mtp: tuple[LayerConfig, ...] = ()
    tied: bool = False
    norm_eps: float = 1e-6
    zero_centred: bool = False
    init_std: float = 0.02

    def config(self) -> DecoderConfig:
        _check_layers(self.layers)
        times = -(-self.layers // len(self.pattern))
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            layers=(*self.first, *self.pattern * times)[: self.layers],
            norm_eps=self.norm_eps,
            zero_centred=self.zero_centred,
            tied=self.tied,
            init_std=self.init_std,
            mtp=self.mtp,
        )


def _check_layers(layers: int) -> None:
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"layers is {layers!r}; it must be a whole number from 1 to {MOST_LAYERS}")
