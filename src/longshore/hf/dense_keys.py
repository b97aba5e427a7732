"""Dense decoders, Qwen3 and Llama: the keys of config.json, and our config.

In: a config.json as a dict. Out: a DecoderConfig, and back. Keys that are missing have the values
that transformers gives them. A Qwen3 of two layers whose second sees 128 tokens:

    {"num_hidden_layers": 2, "use_sliding_window": true, "sliding_window": 128,
     "max_window_layers": 1, …}      layers[0].mixer.window None, layers[1].mixer.window 128
"""

from dataclasses import replace
from typing import Any

from longshore.hf.keys import Raw, count, flag, number
from longshore.hf.rope_keys import read_rope, scaled_length, write_rope
from longshore.model.config import AttentionConfig, DecoderConfig, LayerConfig, MLPConfig
from longshore.model.rope_config import RopeConfig

QWEN3_DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
LLAMA_DEFAULTS = {"max_position_embeddings": 2048}

Windows = tuple[int | None, ...]


def read_qwen3(raw: Raw) -> DecoderConfig:
    raw = {**QWEN3_DEFAULTS, **raw}
    return _read_dense(raw, _read_windows(raw), qk_norm=True)


def read_llama(raw: Raw) -> DecoderConfig:
    raw = {**LLAMA_DEFAULTS, **raw}
    if raw.get("sliding_window") is not None:
        raise ValueError(
            f"sliding_window is {raw['sliding_window']!r}, and LlamaForCausalLM has no windows; "
            "remove the key if the model was trained without"
        )
    return _read_dense(raw, (None,) * count(raw, "num_hidden_layers"), qk_norm=False)


def qwen3_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json that say this config; ValueError if a Qwen3 cannot be it."""
    mixer, windows = _uniform(config)
    if not mixer.qk_norm:
        raise ValueError("its queries and keys have no norm")
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"its windows differ ({', '.join(map(str, sorted(sizes)))})")
    first = next((i for i, window in enumerate(windows) if window is not None), len(windows))
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {
        **_dense_keys(config, mixer),
        "use_sliding_window": bool(sizes),
        "sliding_window": min(sizes, default=None),
        "max_window_layers": first,
        "layer_types": kinds,
    }


def llama_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json that say this config; ValueError if a Llama cannot be it."""
    mixer, windows = _uniform(config)
    if mixer.qk_norm:
        raise ValueError("its queries and keys have norms")
    if any(window is not None for window in windows):
        raise ValueError("it has windows")
    if config.width % mixer.heads:
        raise ValueError(f"its width {config.width} is not a multiple of its {mixer.heads} heads")
    return {**_dense_keys(config, mixer), "mlp_bias": False}


def _read_dense(raw: Raw, windows: Windows, *, qk_norm: bool) -> DecoderConfig:
    _refuse_unsupported(raw)
    width, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    kv_heads = heads
    if raw.get("num_key_value_heads") is not None:
        kv_heads = count(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads, {heads}"
        )
    mixer = AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(raw, width, heads),
        rope=read_rope(raw),
        qk_norm=qk_norm,
        bias=flag(raw, "attention_bias"),
        output_bias=flag(raw, "attention_bias"),
    )
    mlp = MLPConfig(width=count(raw, "intermediate_size"))
    return DecoderConfig(
        vocab_size=count(raw, "vocab_size"),
        width=width,
        layers=tuple(LayerConfig(replace(mixer, window=window), mlp) for window in windows),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        tied=flag(raw, "tie_word_embeddings"),
        init_std=number(raw, "initializer_range", 0.02),
    )


def _head_dim(raw: Raw, width: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return count(raw, "head_dim")
    if width % heads:
        raise ValueError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}; give head_dim"
        )
    return width // heads


def _refuse_unsupported(raw: Raw) -> None:
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {activation!r}; supported is silu")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            method = raw[key].get("quant_method", "?") if isinstance(raw[key], dict) else raw[key]
            raise ValueError(
                f"{key} says the weights are quantized ({method}); supported are plain float "
                "weights: take the unquantized folder"
            )
    if flag(raw, "mlp_bias"):
        raise ValueError("mlp_bias is true; only MLPs without bias are supported")
    if raw.get("attention_dropout"):
        raise ValueError(
            f"attention_dropout is {raw['attention_dropout']!r}; there is no dropout here: set it "
            "to 0"
        )


def _read_windows(raw: Raw) -> Windows:
    """Each layer's window, as layer_types or else max_window_layers says."""
    layers = count(raw, "num_hidden_layers")
    has_windows = flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None
    window = count(raw, "sliding_window") if has_windows else None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = count(raw, "max_window_layers", least=0)
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types must name a kind for each of the {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer_types has {kind!r}; supported are full_attention and sliding_attention"
            )
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "layer_types has sliding_attention, but there is no window; set use_sliding_window "
            "and sliding_window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _uniform(config: DecoderConfig) -> tuple[AttentionConfig, Windows]:
    """The one mixer all layers have, and their windows."""
    mixers = []
    for i, layer in enumerate(config.layers):
        if not isinstance(layer.mixer, AttentionConfig) or not isinstance(layer.mlp, MLPConfig):
            raise ValueError(f"layer {i} is not attention and an MLP")
        if layer.mixer.rope is None:
            raise ValueError(f"layer {i} has no rotary positions")
        if layer.mixer.bias != layer.mixer.output_bias:
            raise ValueError(f"layer {i} has a bias in some projections of its mixer only")
        if layer.mlp != config.layers[0].mlp:
            raise ValueError(f"layer {i} has another MLP than layer 0")
        mixers.append(layer.mixer)
        if replace(layer.mixer, window=None) != replace(mixers[0], window=None):
            raise ValueError(f"layer {i} has another mixer than layer 0")
    return mixers[0], tuple(mixer.window for mixer in mixers)


def _dense_keys(config: DecoderConfig, mixer: AttentionConfig) -> dict[str, Any]:
    rope, mlp = mixer.rope, config.layers[0].mlp
    assert isinstance(rope, RopeConfig)
    assert isinstance(mlp, MLPConfig)
    length = scaled_length(rope)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": mlp.width,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "attention_bias": mixer.bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        **({"max_position_embeddings": length} if length else {}),
        **write_rope(rope, mixer.head_dim),
    }
