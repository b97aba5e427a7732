"""Models of transformers that cannot be trained packed, by the keys of their config.json. No torch.

In: a config.json as a dict. Out: nothing, or a ValueError that names the key and why. What the keys
do not show is refused later, by hf/trial.py, which runs a small copy of the model.

    check_keys({"model_type": "jamba", …})      model_type is 'jamba': its layers are recurrent; …
    check_keys({"attention_dropout": 0.1, …})   attention_dropout is 0.1; set it to 0 in config.json
"""

from collections.abc import Iterator
from math import inf
from typing import Any

from longshore.hf.typed_keys import Raw, shown

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
    for problem in _problems(raw):
        raise ValueError(problem)


def _problems(raw: Raw) -> Iterator[str]:
    yield from _kind_problems(raw)
    yield from _layer_problems(raw)
    for key, value in _numbers(raw):
        if value and key not in HEADS_ONLY and any(part in key for part in DROPS):
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


def _numbers(raw: Raw) -> Iterator[tuple[str, float]]:
    for key, value in raw.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def _ropes(value: Any) -> Iterator[str]:  # noqa: ANN401
    """Every rope_type in the keys about positions, which may be nested by layer type."""
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if key in ("rope_type", "type") and isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict):
            yield from _ropes(inner)
