"""Dense decoders, Qwen3 and Llama: the keys of config.json, and our config.

In: a config.json as a dict. Out: a DecoderConfig, and back. Missing keys have the defaults of
transformers. A Qwen3 of two layers whose second sees 128 tokens:

    {"num_hidden_layers": 2, "use_sliding_window": true, "sliding_window": 128,
     "max_window_layers": 1, …}      layers[0].mixer.window None, layers[1].mixer.window 128
"""

from dataclasses import replace
from typing import Any

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.hf.shared_keys import (
    SILU,
    attention_keys,
    decoder_keys,
    read_attention,
    read_decoder,
    read_layer_types,
    read_layers,
    read_pad_token,
    refuse_unsupported,
    require_gated,
    require_no_mtp,
    require_plain_norms,
)
from longshore.hf.typed_keys import Raw, count, flag, shown

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
    width, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    if width % heads:
        raise ValueError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}, which "
            "transformers refuses in a LlamaForCausalLM"
        )
    if raw.get("sliding_window") is not None:
        raise ValueError(
            f"sliding_window is {shown(raw['sliding_window'])}, but LlamaForCausalLM has no "
            "windows; remove the key if the model was trained without a window"
        )
    return _read_dense(raw, (None,) * read_layers(raw), qk_norm=False)


def qwen3_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json for this config; raises ValueError if it is not a Qwen3."""
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
    """The keys of config.json for this config; raises ValueError if it is not a Llama."""
    mixer, windows = _uniform(config)
    if mixer.qk_norm:
        raise ValueError("its queries and keys have norms")
    if any(window is not None for window in windows):
        raise ValueError("it has windows")
    if config.width % mixer.heads:
        raise ValueError(f"its width {config.width} is not a multiple of its {mixer.heads} heads")
    return {**_dense_keys(config, mixer), "mlp_bias": False}


def _read_dense(raw: Raw, windows: Windows, *, qk_norm: bool) -> DecoderConfig:
    refuse_unsupported(raw, SILU)
    mixer = read_attention(raw, qk_norm=qk_norm)
    mlp = MLPConfig(width=count(raw, "intermediate_size"))
    layers = [LayerConfig(replace(mixer, window=window), mlp) for window in windows]
    return read_decoder(raw, layers, pad_token_id=read_pad_token(raw))


def _read_windows(raw: Raw) -> Windows:
    """Each layer's window, as layer_types or else max_window_layers says."""
    layers = read_layers(raw)
    has_windows = flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None
    window = count(raw, "sliding_window") if has_windows else None
    kinds = read_layer_types(raw, ("full_attention", "sliding_attention"))
    if kinds is None:
        first = count(raw, "max_window_layers", least=0)
        return tuple(window if i >= first else None for i in range(layers))
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "layer_types has sliding_attention, but there is no window; set use_sliding_window "
            "and sliding_window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _uniform(config: DecoderConfig) -> tuple[AttentionConfig, Windows]:
    """The one mixer all layers have, and their windows."""
    require_plain_norms(config)
    require_no_mtp(config)
    mixers = []
    for i, layer in enumerate(config.layers):
        if not isinstance(layer.mixer, AttentionConfig) or not isinstance(layer.mlp, MLPConfig):
            raise ValueError(f"layer {i} is not attention and an MLP")
        if layer.mixer.gate:
            raise ValueError(f"layer {i} has gated attention")
        if layer.mlp != config.layers[0].mlp:
            raise ValueError(f"layer {i} has another MLP than layer 0")
        mixers.append(layer.mixer)
        if replace(layer.mixer, window=None) != replace(mixers[0], window=None):
            raise ValueError(f"layer {i} has another mixer than layer 0")
    return mixers[0], tuple(mixer.window for mixer in mixers)


def _dense_keys(config: DecoderConfig, mixer: AttentionConfig) -> dict[str, Any]:
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MLPConfig)
    return {
        **decoder_keys(config),
        **attention_keys(mixer),
        "intermediate_size": require_gated(mlp).width,
        "rms_norm_eps": config.norm_eps,
    }
