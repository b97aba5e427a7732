"""Ready decoders by name. Torch-free.

In: a name, and numbers to change. Out: a DecoderConfig. The large ones have the public shapes, the
tiny ones train on a laptop and split over 2 or 4 lanes by heads (tiny-qwen3 also over 8):

    preset("llama-3.2-1b")                      16 layers, 1,235,814,400 parameters
    preset("tiny-qwen3", layers=4, tied=True)   the same as tiny-qwen3 otherwise
"""

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

from longshore.model.config import AttentionConfig, DecoderConfig, LayerConfig, MLPConfig
from longshore.model.rope_config import Llama3Scaling, RopeConfig


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
        if not isinstance(self.layers, int) or self.layers < 1:
            raise ValueError(f"layers is {self.layers!r}; it must be a whole number of 1 or more")
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


_LLAMA_1B = Dense(
    layers=16,
    width=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp=8192,
    vocab_size=128_256,
    tied=True,
    norm_eps=1e-5,
    rope=RopeConfig(
        theta=500_000.0,
        scaling=Llama3Scaling(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
        ),
    ),
)
_QWEN3_600M = Dense(
    layers=28,
    width=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    mlp=3072,
    vocab_size=151_936,
    tied=True,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0),
    qk_norm=True,
)
PRESETS = {
    "llama-3.2-1b": _LLAMA_1B,
    "qwen3-0.6b": _QWEN3_600M,
    "qwen3-8b": replace(
        _QWEN3_600M, layers=36, width=4096, heads=32, kv_heads=8, mlp=12_288, tied=False
    ),
    "tiny-llama": replace(
        _LLAMA_1B, layers=2, width=64, heads=8, kv_heads=4, head_dim=16, mlp=192, vocab_size=256
    ),
    "tiny-qwen3": replace(
        _QWEN3_600M,
        layers=2,
        width=64,
        heads=8,
        kv_heads=8,
        head_dim=16,
        mlp=192,
        vocab_size=256,
        tied=False,
    ),
}


def preset(name: str, **overrides: Any) -> DecoderConfig:  # noqa: ANN401
    """The decoder of that name, with some of the numbers of `Dense` changed."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; {_near(name, list(PRESETS))}")
    known = [field.name for field in fields(Dense)]
    for key in overrides:
        if key not in known:
            raise ValueError(f"preset {name} has no {key!r} to change; {_near(key, known)}")
    return replace(PRESETS[name], **overrides).config()


def _near(word: str, known: list[str]) -> str:
    """A hint: the nearest known word, and all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"{f'did you mean {near[0]}? ' if near else ''}known are {', '.join(known)}"
