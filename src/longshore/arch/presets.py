"""Presets: ready decoders by name. Torch-free.

In: a name, and numbers to override. Out: a DecoderConfig. The large ones have the public shapes;
the tiny ones train on a laptop, and their heads divide by 2 and 4 lanes (tiny-qwen3's also by 8):

    preset("llama-3.2-1b")                      16 layers, 1,235,814,400 parameters
    preset("tiny-qwen3", layers=4, tied=True)   otherwise tiny-qwen3

A preset is described by a few numbers (Dense) or by a pattern of layers (Patterned):

    Dense(layers=2, width=64, heads=4, …).config()               two identical layers
    Patterned(layers=5, first=(a,), pattern=(b, c), …).config()  layers a b c b c

Numbers are those of config.json of the public folders: meta-llama/Llama-3.2-1B, Qwen/Qwen3-0.6B,
Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B, Qwen/Qwen3-Next-80B-A3B-Instruct (without its depth of
multi-token prediction, which that file does not mention), deepseek-ai/DeepSeek-V3 (with its one
depth), deepseek-ai/DeepSeek-V4-Flash (the same) and nvidia/Nemotron-H-8B-Base-8K. Experts are
balanced by a loss with weight 0.001 for Qwen3, its router_aux_loss_coef, and for DeepSeek, as in
the report of V3, by a bias that moves by 0.001 and a loss with weight 0.0001. tiny-hybrid has every
kind of layer but those of DeepSeek-V4.

The layers of DeepSeek-V4, from the few numbers in which its sizes differ. Pure Python.

In: attention with a window alone, an index, experts. Out: the first layers, the pattern that
follows them, and the layer of a depth. Two layers have a window alone; then entries of 4 tokens,
some of which an index chooses, and entries of `ratio` tokens take turns. Experts of the first
layers are chosen by token ids. With 3 such layers:

    first    window #, window #, chosen #, pooled        # by token ids
    pattern  chosen, pooled
"""

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import MOST_LAYERS, DecoderConfig, HyperConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.rope import Llama3Scaling, RopeConfig, YarnScaling
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig

FLASH_WINDOW = SparseAttentionConfig(
    heads=64, head_dim=512, rope_dim=64, q_rank=1024, window=128, o_groups=8, o_rank=1024
)
FLASH_INDEX = IndexConfig(heads=64, head_dim=128, top_k=512)
FLASH_MOE = MoEConfig(
    experts=256,
    top_k=6,
    width=2048,
    score="sqrt-softplus",
    scale=1.5,
    shared_width=2048,
    bias_update=1e-3,
    aux_weight=1e-4,
    limit=10.0,
)
TINY_WINDOW = replace(
    FLASH_WINDOW, heads=4, head_dim=16, rope_dim=8, q_rank=24, window=8, o_groups=2, o_rank=16
)
TINY_INDEX = IndexConfig(heads=4, head_dim=16, top_k=4)
TINY_MOE = replace(FLASH_MOE, experts=4, top_k=2, width=32, shared_width=32)


class V4Layers(NamedTuple):
    """As arch/presets.py:Patterned takes them."""

    first: tuple[LayerConfig, ...]
    pattern: tuple[LayerConfig, ...]
    mtp: tuple[LayerConfig, ...]


def deepseek_v4(
    window: SparseAttentionConfig,
    index: IndexConfig,
    moe: MoEConfig,
    *,
    hashed: int,
    vocab_size: int,
    ratio: int,
    trained: int,
) -> V4Layers:
    """hashed: layers whose experts are chosen by token ids. trained: the length before YaRN."""
    yarn = YarnScaling(factor=16.0, original_length=trained, attention_factor=1.0)
    far = RopeConfig(theta=160_000.0, scaling=yarn)
    chosen = replace(window, ratio=4, index=index, rope=far)
    pooled = replace(window, ratio=ratio, rope=far)
    table = replace(moe, bias=False, bias_update=0.0, aux_weight=0.0, hash_rows=vocab_size)
    # An even number, so that the pattern begins where it would without them.
    mixers = (window, window, *(chosen, pooled) * hashed)[: hashed + hashed % 2]
    first = tuple(
        LayerConfig(mixer, table if n < hashed else moe) for n, mixer in enumerate(mixers)
    )
    pattern = LayerConfig(chosen, moe), LayerConfig(pooled, moe)
    return V4Layers(first, pattern, (LayerConfig(window, moe),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A decoder of identical layers: attention, then SwiGLU of `mlp` channels; see the configs."""

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
    """A decoder whose layers are `first`, then `pattern` repeated, cut at `layers`."""

    layers: int
    width: int
    vocab_size: int
    pattern: tuple[LayerConfig, ...]
    first: tuple[LayerConfig, ...] = ()
    mtp: tuple[LayerConfig, ...] = ()
    residuals: HyperConfig | None = None
    tied: bool = False
    norm_eps: float = 1e-6
    zero_centred: bool = False
    init_std: float = 0.02

    def config(self) -> DecoderConfig:
        _check_layers(self.layers)
        times = -(-self.layers // len(self.pattern))
        layers = (*self.first, *self.pattern * times)[: self.layers]
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            layers=tuple(_of_vocabulary(layer, self.vocab_size) for layer in layers),
            norm_eps=self.norm_eps,
            zero_centred=self.zero_centred,
            tied=self.tied,
            init_std=self.init_std,
            mtp=self.mtp,
            residuals=self.residuals,
        )


def _of_vocabulary(layer: LayerConfig, vocab_size: int) -> LayerConfig:
    """A layer whose experts are chosen by token ids, with a table for all of them."""
    moe = layer.mlp
    if not isinstance(moe, MoEConfig) or not moe.hash_rows:
        return layer
    return replace(layer, mlp=replace(moe, hash_rows=vocab_size))


def _check_layers(layers: int) -> None:
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"layers is {layers!r}; it must be a whole number from 1 to {MOST_LAYERS}")


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


def _qwen3_moe(*, heads: int, kv_heads: int, head_dim: int, moe: MoEConfig) -> LayerConfig:
    rope = RopeConfig(theta=1_000_000.0)
    mixer = AttentionConfig(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, qk_norm=True
    )
    return LayerConfig(mixer, moe)


def _qwen3_next(
    full: AttentionConfig, scan: DeltaNetConfig, moe: MoEConfig
) -> tuple[LayerConfig, ...]:
    """Three delta nets, then gated attention that rotates a quarter of each head."""
    rope = RopeConfig(theta=10_000_000.0, rotary_dim=full.head_dim // 4)
    full = replace(full, rope=rope, qk_norm=True, gate=True)
    moe = replace(moe, shared_width=moe.width, shared_gate=True, aux_weight=1e-3)
    return *(LayerConfig(scan, moe),) * 3, LayerConfig(full, moe)


def _nemotron(
    pattern: str, scan: Mamba2Config, full: AttentionConfig, mlp: int
) -> tuple[LayerConfig, ...]:
    """A layer for each letter: M Mamba2, * attention without positions, - a squared ReLU."""
    kinds = {
        "M": LayerConfig(replace(scan, dt_min=1e-3), None),
        "*": LayerConfig(replace(full, rope=None), None),
        "-": LayerConfig(None, MLPConfig(width=mlp, activation="relu2")),
    }
    return tuple(kinds[letter] for letter in pattern)


_V3_MLA = MLAConfig(
    heads=128,
    kv_rank=512,
    q_rank=1536,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    rope=RopeConfig(
        scaling=YarnScaling(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
    ),
)
_V3_MOE = MoEConfig(
    experts=256,
    top_k=8,
    width=2048,
    score="sigmoid",
    groups=8,
    top_groups=4,
    scale=2.5,
    shared_width=2048,
    bias_update=1e-3,
    aux_weight=1e-4,
)
_TINY_MLA = replace(_V3_MLA, heads=4, kv_rank=32, q_rank=48, nope_dim=16, rope_dim=8, value_dim=16)
_TINY_V3_MOE = replace(
    _V3_MOE, experts=8, top_k=2, width=32, groups=4, top_groups=2, shared_width=32
)

_V4_FLASH = deepseek_v4(
    FLASH_WINDOW, FLASH_INDEX, FLASH_MOE, hashed=3, vocab_size=129_280, ratio=128, trained=65_536
)
_TINY_V4 = deepseek_v4(
    TINY_WINDOW, TINY_INDEX, TINY_MOE, hashed=2, vocab_size=256, ratio=16, trained=64
)

_TINY_FULL = AttentionConfig(heads=8, kv_heads=4, head_dim=16)
_TINY_DELTA = DeltaNetConfig(key_heads=4, value_heads=8, key_dim=16, value_dim=16)
_TINY_MAMBA = Mamba2Config(heads=8, head_dim=16, state_dim=16, groups=4)
_TINY_MOE = MoEConfig(experts=8, top_k=2, width=64, aux_weight=1e-3)
_HYBRID_MOE = replace(
    _TINY_MOE, score="sigmoid", shared_width=64, bias_update=1e-3, aux_weight=1e-3
)
_HYBRID_FULL = LayerConfig(replace(_TINY_FULL, qk_norm=True), _HYBRID_MOE)

PRESETS: dict[str, Dense | Patterned] = {
    "llama-3.2-1b": _LLAMA_1B,
    "qwen3-0.6b": _QWEN3_600M,
    "qwen3-8b": replace(
        _QWEN3_600M, layers=36, width=4096, heads=32, kv_heads=8, mlp=12_288, tied=False
    ),
    "qwen3-30b-a3b": Patterned(
        layers=48,
        width=2048,
        vocab_size=151_936,
        pattern=(
            _qwen3_moe(
                heads=32,
                kv_heads=4,
                head_dim=128,
                moe=MoEConfig(experts=128, top_k=8, width=768, aux_weight=1e-3),
            ),
        ),
    ),
    "qwen3-next-80b-a3b": Patterned(
        layers=48,
        width=2048,
        vocab_size=151_936,
        zero_centred=True,
        pattern=_qwen3_next(
            AttentionConfig(heads=16, kv_heads=2, head_dim=256),
            DeltaNetConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
            MoEConfig(experts=512, top_k=10, width=512),
        ),
    ),
    "deepseek-v3": Patterned(
        layers=61,
        width=7168,
        vocab_size=129_280,
        first=(LayerConfig(_V3_MLA, MLPConfig(width=18_432)),) * 3,
        pattern=(LayerConfig(_V3_MLA, _V3_MOE),),
        mtp=(LayerConfig(_V3_MLA, _V3_MOE),),
    ),
    "deepseek-v4-flash": Patterned(
        layers=43,
        width=4096,
        vocab_size=129_280,
        residuals=HyperConfig(count=4),
        first=_V4_FLASH.first,
        pattern=_V4_FLASH.pattern,
        mtp=_V4_FLASH.mtp,
    ),
    "nemotron-h-8b": Patterned(
        layers=52,
        width=4096,
        vocab_size=131_072,
        norm_eps=1e-5,
        pattern=_nemotron(
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            Mamba2Config(heads=128, head_dim=64, state_dim=128, groups=8),
            AttentionConfig(heads=32, kv_heads=8, head_dim=128),
            21_504,
        ),
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
    "tiny-qwen3-moe": Patterned(
        layers=2,
        width=64,
        vocab_size=256,
        pattern=(_qwen3_moe(heads=8, kv_heads=4, head_dim=16, moe=_TINY_MOE),),
    ),
    "tiny-qwen3-next": Patterned(
        layers=4,
        width=64,
        vocab_size=256,
        zero_centred=True,
        pattern=_qwen3_next(_TINY_FULL, _TINY_DELTA, replace(_TINY_MOE, width=32)),
    ),
    "tiny-deepseek-v3": Patterned(
        layers=3,
        width=64,
        vocab_size=256,
        first=(LayerConfig(_TINY_MLA, MLPConfig(width=192)),),
        pattern=(LayerConfig(_TINY_MLA, _TINY_V3_MOE),),
        mtp=(LayerConfig(_TINY_MLA, _TINY_V3_MOE),),
    ),
    "tiny-deepseek-v4": Patterned(
        layers=4,
        width=64,
        vocab_size=256,
        residuals=HyperConfig(count=2, iterations=4),
        first=_TINY_V4.first,
        pattern=_TINY_V4.pattern,
        mtp=_TINY_V4.mtp,
    ),
    "tiny-nemotron-h": Patterned(
        layers=4,
        width=64,
        vocab_size=256,
        norm_eps=1e-5,
        pattern=_nemotron("M-M*", _TINY_MAMBA, _TINY_FULL, 256),
    ),
    "tiny-hybrid": Patterned(
        layers=4,
        width=64,
        vocab_size=256,
        pattern=(
            LayerConfig(_TINY_DELTA, MLPConfig(width=192)),
            LayerConfig(_TINY_MAMBA, _HYBRID_MOE),
            LayerConfig(_TINY_DELTA, _HYBRID_MOE),
            _HYBRID_FULL,
        ),
        mtp=(_HYBRID_FULL,),
    ),
}


def preset(name: str, **overrides: Any) -> DecoderConfig:  # noqa: ANN401
    """The decoder of that name, with some numbers of its Dense or Patterned overridden."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {_near(name, list(PRESETS))}")
    known = [field.name for field in fields(PRESETS[name])]
    for key in overrides:
        if key not in known:
            raise ValueError(f"preset {name} has no {key!r} to change; {_near(key, known)}")
    return replace(PRESETS[name], **overrides).config()


def _near(word: str, known: list[str]) -> str:
    """A hint: the nearest known name, and all known names."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"{f'did you mean {near[0]}? ' if near else ''}known are {', '.join(known)}"
