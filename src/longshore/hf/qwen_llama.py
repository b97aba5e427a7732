"""Qwen3, Llama, Qwen3-MoE and Qwen3-Next: the keys of config.json, and our config.

In: a config.json as a dict. Out: a DecoderConfig, and back. Missing keys have the defaults of
transformers. A Qwen3 of two layers whose second sees 128 tokens, and a Qwen3-MoE:

    {"num_hidden_layers": 2, "use_sliding_window": true, "sliding_window": 128,
     "max_window_layers": 1, …}      layers[0].mixer.window None, layers[1].mixer.window 128
    {"num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts": 128, …}
    layers[0].mlp an MLPConfig, layers[1].mlp and layers[2].mlp a MoEConfig with 128 experts

Qwen3-Next has one depth of multi-token prediction, a layer of full attention and experts, which
transformers leaves out; config_file.py checks whether a folder has its tensors.
"""

from dataclasses import replace
from typing import Any

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.scan import DeltaNetConfig
from longshore.hf.keys import (
    SILU,
    Raw,
    all_of_kind,
    attention_keys,
    common_part,
    common_part_or_none,
    count,
    decoder_keys,
    flag,
    number,
    parts_of_kind,
    read_attention,
    read_decoder,
    read_layer_types,
    read_layers,
    read_pad_token,
    refuse_unsupported,
    require_gated,
    require_no_mtp,
    require_plain_norms,
    shown,
)

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
    mixers = all_of_kind(config.layers, "mixer", AttentionConfig, "is not attention and an MLP")
    all_of_kind(config.layers, "mlp", MLPConfig, "is not attention and an MLP")
    if gated := [i for i, mixer in enumerate(mixers) if mixer.gate]:
        raise ValueError(f"layer {gated[0]} has gated attention")
    common_part([replace(mixer, window=None) for mixer in mixers], "mixer")
    return mixers[0], tuple(mixer.window for mixer in mixers)


def _dense_keys(config: DecoderConfig, mixer: AttentionConfig) -> dict[str, Any]:
    mlp = common_part(parts_of_kind(config.layers, "mlp", MLPConfig), "MLP")
    return {
        **decoder_keys(config),
        **attention_keys(mixer),
        "intermediate_size": require_gated(mlp).width,
        "rms_norm_eps": config.norm_eps,
    }


MOE_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
NEXT_DEFAULTS = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 5632,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "num_nextn_predict_layers": 1,
}
SCAN_KEYS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "kernel",
}
"""Keys of a delta net, and the fields of DeltaNetConfig."""
NO_ATTENTION = {"num_attention_heads": 16, "hidden_act": "silu"}
"""Attention keys of a Qwen3-Next with delta nets alone: the defaults of transformers."""


def read_qwen3_moe(raw: Raw) -> DecoderConfig:
    raw = {**MOE_DEFAULTS, **raw}
    if raw.get("num_local_experts") is not None:  # as transformers 5 writes it
        raw["num_experts"] = raw["num_local_experts"]
    refuse_unsupported(raw, SILU)
    mixer = read_attention(raw, qk_norm=True)
    if flag(raw, "use_sliding_window") and raw["sliding_window"] is not None:
        mixer = replace(mixer, window=count(raw, "sliding_window"))
    layers = [LayerConfig(mixer, mlp) for mlp in _read_mlps(raw, _read_experts(raw))]
    return read_decoder(raw, layers, pad_token_id=read_pad_token(raw))


def qwen3_moe_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json for this config; raises ValueError if it is not a Qwen3-MoE."""
    require_plain_norms(config)
    require_no_mtp(config)
    mixers = all_of_kind(config.layers, "mixer", AttentionConfig, "is not attention")
    mixer = common_part(mixers, "attention")
    _check_attention(mixer, gate=False)
    moe, mlp_keys = _mlp_keys(config)
    if moe is not None and moe.shared_width:
        raise ValueError("it has a shared expert")
    return {
        **decoder_keys(config),
        **attention_keys(mixer),
        **mlp_keys,
        "rms_norm_eps": config.norm_eps,
        "use_sliding_window": mixer.window is not None,
        "sliding_window": mixer.window,
    }


def read_qwen3_next(raw: Raw) -> DecoderConfig:
    raw = {**NEXT_DEFAULTS, **raw}
    refuse_unsupported(raw, SILU)
    full = replace(read_attention(raw, qk_norm=True, partial=True), gate=True)
    scan = DeltaNetConfig(**{name: count(raw, key) for key, name in SCAN_KEYS.items()})
    shared = count(raw, "shared_expert_intermediate_size")
    moe = replace(_read_experts(raw), shared_width=shared, shared_gate=True)
    kinds = read_layer_types(raw, ("full_attention", "linear_attention"))
    if kinds is None:
        interval = count(raw, "full_attention_interval")
        is_full = [(i + 1) % interval == 0 for i in range(read_layers(raw))]
    else:
        is_full = [kind == "full_attention" for kind in kinds]
    mixers = [full if each else scan for each in is_full]
    layers = [LayerConfig(*both) for both in zip(mixers, _read_mlps(raw, moe), strict=True)]
    depths = count(raw, "num_nextn_predict_layers", least=0)
    if depths > 1:
        raise ValueError(f"num_nextn_predict_layers is {depths}; only 0 and 1 are supported here")
    return read_decoder(
        raw,
        layers,
        zero_centred=True,
        mtp=(LayerConfig(full, moe),) * depths,
        pad_token_id=read_pad_token(raw),
    )


def qwen3_next_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json for this config; raises ValueError if it is not a Qwen3-Next."""
    if not config.zero_centred:
        raise ValueError("its norms are not zero-centred")
    full = common_part_or_none(
        parts_of_kind((*config.layers, *config.mtp), "mixer", AttentionConfig), "attention"
    )
    scan = common_part_or_none(parts_of_kind(config.layers, "mixer", DeltaNetConfig), "delta net")
    for i, layer in enumerate(config.layers):
        if layer.mixer is None or layer.mixer not in (full, scan):
            raise ValueError(f"layer {i} is neither attention nor a delta net")
    if full is not None:
        _check_attention(full, gate=True)
        if full.window is not None:
            raise ValueError("it has windows")
    moe, mlp_keys = _mlp_keys(config)
    if moe is not None and not moe.shared_gate:
        raise ValueError("it has no shared expert with a gate")
    if config.mtp and config.mtp != (LayerConfig(full, moe),):
        raise ValueError("its multi-token prediction is not one depth of attention and experts")
    is_full = [isinstance(layer.mixer, AttentionConfig) for layer in config.layers]
    return {
        **decoder_keys(config),
        **(NO_ATTENTION if full is None else attention_keys(full, partial=True)),
        **mlp_keys,
        "rms_norm_eps": config.norm_eps,
        **({} if moe is None else {"shared_expert_intermediate_size": moe.shared_width}),
        "layer_types": ["full_attention" if full else "linear_attention" for full in is_full],
        **({} if scan is None else {key: getattr(scan, name) for key, name in SCAN_KEYS.items()}),
        "num_nextn_predict_layers": len(config.mtp),
    }


def balance_weight(raw: Raw) -> float:
    """The weight of the balance loss that transformers adds in training, 0 for none.

    transformers has one loss for all layers and the batch, we have one for each layer and sequence.
    """
    if not flag(raw, "output_router_logits") or raw.get("router_aux_loss_coef") == 0:
        return 0.0
    return number(raw, "router_aux_loss_coef", 0.001)


def _read_experts(raw: Raw) -> MoEConfig:
    return MoEConfig(
        experts=count(raw, "num_experts"),
        top_k=count(raw, "num_experts_per_tok"),
        width=count(raw, "moe_intermediate_size"),
        normalise=flag(raw, "norm_topk_prob"),
    )


def _read_mlps(raw: Raw, moe: MoEConfig) -> list[MoEConfig | MLPConfig]:
    """The feed-forward part of each layer."""
    layers, step = read_layers(raw), count(raw, "decoder_sparse_step")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise ValueError(
            f"mlp_only_layers is {shown(dense)}; it must be a list of layers from 0 to {layers - 1}"
        )
    named = set(dense)
    sparse = [i not in named and (i + 1) % step == 0 for i in range(layers)]
    if all(sparse):
        return [moe] * layers
    mlp = MLPConfig(width=count(raw, "intermediate_size"))
    return [moe if chosen else mlp for chosen in sparse]


def _mlp_keys(config: DecoderConfig) -> tuple[MoEConfig | None, dict[str, Any]]:
    """The experts, if any, and the keys for which layers have them and which an MLP."""
    moes = parts_of_kind((*config.layers, *config.mtp), "mlp", MoEConfig)
    moe = common_part_or_none(moes, "layer of experts")
    dense = [i for i, expert in enumerate(moes[: len(config.layers)]) if expert is None]
    width = {}
    if dense:
        mlps = parts_of_kind([config.layers[i] for i in dense], "mlp", MLPConfig)
        if None in mlps:
            raise ValueError(f"layer {dense[mlps.index(None)]} has neither experts nor an MLP")
        width = {"intermediate_size": require_gated(common_part(mlps, "MLP")).width}
    where = {**width, "mlp_only_layers": dense, "decoder_sparse_step": 1}
    if moe is None:
        return None, where
    if moe.score != "softmax" or moe.bias or moe.groups != 1 or moe.scale != 1:
        raise ValueError("its experts are not chosen by plain softmax scores")
    return moe, {
        **where,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.width,
        "norm_topk_prob": moe.normalise,
    }


def _check_attention(mixer: AttentionConfig, *, gate: bool) -> None:
    if not mixer.qk_norm:
        raise ValueError("its queries and keys have no norm")
    if mixer.gate != gate:
        raise ValueError(f"its attention has {'a' if mixer.gate else 'no'} gate")
