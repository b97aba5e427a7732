"""Any decoder of transformers by the common keys of its config.json: its size, or why not.

In: a config.json as a dict. Out: a DecoderConfig for the planner's cost, FLOPs, memory and the
shapes that lanes exchange, exact where we know the architecture; or a ValueError that names a key
with which the model cannot be trained packed. The model itself is transformers' own code
(hf/adapter.py, which also runs a small copy to find what the keys do not show). No torch.

    describe_decoder({"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, …})
    18 layers of width 640, of which those named sliding_attention have a window
    check_keys({"attention_dropout": 0.1, …})   attention_dropout is 0.1; set it to 0 in config.json
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.hf.config_file import find_architecture
from longshore.hf.keys import Raw, count, flag, shown

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k")
DENSE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
OLDER = {
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
"""Older spellings of keys."""
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")


def describe_decoder(raw: Raw) -> DecoderConfig:
    """Exact for architectures we know, else by the common keys; without further depths."""
    try:
        return replace(find_architecture(raw).read(raw), mtp=())
    except ValueError:
        return generic_decoder(raw)


def generic_decoder(raw: Raw) -> DecoderConfig:
    """The decoder that the common keys describe."""
    raw = {**{ours: raw[old] for old, ours in OLDER.items() if old in raw}, **raw}
    width, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    layers = range(count(raw, "num_hidden_layers"))
    kinds = raw.get("layer_types")
    kinds = kinds if isinstance(kinds, list) and len(kinds) == len(layers) else None
    window = _one(raw, ("sliding_window",))
    if kinds is None and not flag(raw, "use_sliding_window", True):
        window = None
    kv_heads = _one(raw, ("num_key_value_heads",)) or heads
    attention = AttentionConfig(
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=_one(raw, ("head_dim",)) or max(2, width // heads),
        bias=bool(raw.get("attention_bias")),
        output_bias=bool(raw.get("attention_bias")),
    )
    near = replace(attention, window=window) if window else attention
    return DecoderConfig(
        vocab_size=count(raw, "vocab_size"),
        width=width,
        layers=tuple(
            LayerConfig(
                near if kinds is None or kinds[i] == "sliding_attention" else attention,
                _feed_forward(raw, i, width),
            )
            for i in layers
        ),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _feed_forward(raw: Raw, layer: int, width: int) -> MLPConfig | MoEConfig:
    experts, dense = _one(raw, EXPERTS), _one(raw, DENSE) or 4 * width
    if not experts or layer < (_one(raw, ("first_k_dense_replace",)) or 0):
        return MLPConfig(width=dense)
    each = _one(raw, ("moe_intermediate_size", "expert_ffn_hidden_size")) or dense
    shared = _one(raw, SHARED) or each * (_one(raw, ("n_shared_experts",)) or 0)
    top_k = min(_one(raw, TOP_K) or 1, experts)
    return MoEConfig(experts=experts, top_k=top_k, width=each, shared_width=shared)


def _one(raw: Raw, keys: tuple[str, ...]) -> int | None:
    """The first of these keys that has a value."""
    return next((count(raw, key, least=0) for key in keys if raw.get(key)), None)


WAY_OUT = "it would be trained wrongly, so Longshore refuses it; choose another model"

LAYER_TYPES = ("full_attention", "sliding_attention")
RECURRENT = ("mamba", "ssm_", "rwkv", "recurrent", "linear_num_", "linear_conv", "conv_L_cache")
"""Beginnings of keys and model types of models with recurrent layers."""
RECURRENT_TYPES = ("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h", "lfm2", "xlstm")
OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "encoder")
LENGTH_ROPES = ("dynamic", "longrope", "su")
"""Rotary scalings that depend on the longest position of the whole batch."""
DROPS = ("dropout", "pdrop", "drop_rate", "layerdrop", "jitter_noise")
HEADS_ONLY = ("classifier_dropout", "summary_first_dropout", "token_classifier_dropout")
"""Dropout of heads that a causal language model does not have."""
LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Keys that change the logits after the head."""


def check_keys(raw: Raw) -> None:
    """Refuses what can be seen in the keys."""
    if problem := next(_problems(raw), None):
        raise ValueError(problem)


def _problems(raw: Raw) -> Iterator[str]:
    yield from _kind_problems(raw)
    yield from _layer_problems(raw)
    for key, value in raw.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        drops = key not in HEADS_ONLY and any(part in key for part in DROPS)
        if is_number and value and drops:
            yield (
                f"{key} is {value}; packed and split sequences would drop other numbers than alone,"
                " so set it to 0 in config.json"
            )
    for key in LOGITS:
        number = raw.get(key)
        if number is not None and not (isinstance(number, int | float) and 0 < number < inf):
            yield f"{key} is {shown(number)}, but logits are changed by a number above 0"
    if raw.get("output_router_logits"):
        yield (
            "output_router_logits is true, so transformers adds a balance loss over the whole "
            "batch, which depends on how sequences are packed; set it to false in config.json, or "
            "use model.code=longshore, which has a balance loss of each sequence"
        )


def _kind_problems(raw: Raw) -> Iterator[str]:
    kind = str(raw.get("model_type"))
    if raw.get("is_encoder_decoder"):
        yield f"is_encoder_decoder is true: it has cross attention; {WAY_OUT}"
    for key in OTHER_INPUTS:
        if raw.get(key):
            yield f"it has a {key}, so it reads more than text; give a folder of its text model"
    if raw.get("quantization_config"):
        yield (
            "quantization_config: its weights are quantized and cannot be trained; convert them "
            "to bfloat16 first"
        )
    if raw.get("use_bidirectional_attention") or raw.get("is_causal") is False:
        yield f"its attention is not causal; {WAY_OUT}"
    if kind in RECURRENT_TYPES or kind.startswith(RECURRENT):
        yield f"model_type is {shown(kind)}: its layers are recurrent; {WAY_OUT}"


def _layer_problems(raw: Raw) -> Iterator[str]:
    kinds = raw.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in LAYER_TYPES:
            yield f"layer_types has {shown(kind)}, of which Longshore knows nothing; {WAY_OUT}"
    for key in raw:
        if key.startswith(RECURRENT) and raw[key]:
            yield f"it has the key {key}: some of its layers are recurrent; {WAY_OUT}"
    if raw.get("attention_chunk_size"):
        yield f"attention_chunk_size: its attention is chunked; {WAY_OUT}"
    if raw.get("index_topk"):
        yield f"index_topk: its attention is sparse, to tokens that an index chooses; {WAY_OUT}"
    for rope in _ropes(raw):
        if rope in LENGTH_ROPES:
            yield (
                f"rope_type is {rope!r}: in transformers it depends on the longest sequence of a "
                "batch; use model.code=longshore, where it is each sequence's own"
            )


def _ropes(value: Any) -> Iterator[str]:  # noqa: ANN401
    """Every rope_type in the keys about positions, which may be nested by layer type."""
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if key in ("rope_type", "type") and isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict):
            yield from _ropes(inner)
