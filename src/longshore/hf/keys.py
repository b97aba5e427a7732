"""Keys of config.json that several architectures share, read and written.

In: a config.json as a dict, or parts of our config. Out: parts of our config, or keys. Missing keys
have the defaults of transformers.

    read_attention({"num_attention_heads": 4, "hidden_size": 64, …}, qk_norm=True)
    AttentionConfig(heads=4, kv_heads=4, head_dim=16, qk_norm=True, …)

Rotary positions as config.json spells them, and as we do.

In: a config.json of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`). Out: a
RopeConfig, and back. The older spelling is written, which both versions read.

    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    RopeConfig(theta=500000.0, scaling=LinearScaling(factor=4.0))

Quantized checkpoints, refused by name before anything is trained. No torch.

In: config.json of a folder, and the headers of its files. Out: nothing, or a ValueError that says
how the weights are quantized and how to get a folder of plain weights. Training needs weights that
small steps can change; those of FP8 or 4 bits are rounded, and their scales are tensors of their
own.

    refuse_quantized({"quantization_config": {"quant_method": "mxfp4"}})     … Mxfp4Config(…) …
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import MOST_LAYERS, DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.part import Part
from longshore.arch.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from longshore.hf.tensor_map import read_header
from longshore.hf.typed_keys import Raw, count, flag, maybe_number, number, numbers, shown

ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""All keys that `read_rope` reads, except max_position_embeddings."""


def read_rope(raw: Raw, head_dim: int | None = None) -> RopeConfig:
    """The rotary positions of a model, the same in all layers.

    head_dim: for models where RoPE may rotate only a share of each head; None for the others.
    """
    parameters = rope_object(raw)
    if nested := [key for key, value in parameters.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"rope_parameters differ by layer type ({', '.join(nested)}); only one set for all "
            "layers is supported"
        )
    rope = {**parameters, "rope_theta": parameters.get("rope_theta", raw.get("rope_theta"))}
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1) and head_dim is None:
        raise ValueError(f"partial_rotary_factor is {shown(share)}; only 1 is supported here")
    return RopeConfig(
        theta=number(rope, "rope_theta", 10_000.0),
        rotary_dim=None if head_dim is None else _rotary_dim(share, head_dim),
        scaling=_scaling(raw, rope),
    )


def rope_object(raw: Raw) -> Raw:
    """rope_scaling, or rope_parameters; empty where neither is there."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters is {shown(parameters)}; it must be an object")
    return parameters


def write_rope(rope: RopeConfig, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """rope_theta, rope_scaling and, where it may be partial, partial_rotary_factor."""
    rotary = rope.rotary_dim or head_dim
    if rotary != head_dim and not partial:
        raise ValueError(f"rotary_dim is {rope.rotary_dim}; only whole heads can be written here")
    share = {"partial_rotary_factor": rotary / head_dim} if partial else {}
    if rope.scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None, **share}
    scaling = _WRITERS[type(rope.scaling)](rope.scaling)
    return {
        "rope_theta": rope.theta,
        "rope_scaling": {key: value for key, value in scaling.items() if value is not None},
        **share,
    }


def _rotary_dim(share: Any, head_dim: int) -> int | None:  # noqa: ANN401
    """None for whole heads."""
    key = "partial_rotary_factor"
    part = number({key: share}, key, 1.0)
    if part > 1:
        raise ValueError(f"partial_rotary_factor is {part:g}; it must be at most 1")
    dims = int(head_dim * part)
    return None if dims == head_dim else dims


def scaled_length(rope: RopeConfig) -> int | None:
    """max_position_embeddings that the scaling implies; None where it implies none."""
    match rope.scaling:
        case DynamicScaling(original_length=length):
            return length
        case YarnScaling() | Llama3Scaling() | LongRopeScaling() as scaling:
            return round((scaling.factor or 1.0) * scaling.original_length)
    return None


def _scaling(raw: Raw, rope: Raw) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(["default", *_READERS])
        raise ValueError(f"rope_type is {shown(kind)}; supported are {known}")
    return _READERS[kind](raw, rope)


def _original(raw: Raw, rope: Raw) -> int:
    key = "original_max_position_embeddings"
    for holder in (raw, rope):
        if holder.get(key) is not None:
            return count(holder, key)
    return count(raw, "max_position_embeddings")


def _factor(raw: Raw, rope: Raw) -> float:
    """The factor, or else the ratio of the two lengths."""
    if rope.get("factor") is not None:
        return number(rope, "factor")
    return count(raw, "max_position_embeddings") / _original(raw, rope)


def _read_linear(raw: Raw, rope: Raw) -> RopeScaling:
    return LinearScaling(factor=number(rope, "factor"))


def _read_dynamic(raw: Raw, rope: Raw) -> RopeScaling:
    return DynamicScaling(
        factor=number(rope, "factor"), original_length=count(raw, "max_position_embeddings")
    )


def _read_yarn(raw: Raw, rope: Raw) -> RopeScaling:
    return YarnScaling(
        factor=_factor(raw, rope),
        original_length=_original(raw, rope),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        attention_factor=maybe_number(rope, "attention_factor"),
        mscale=_unless_zero(rope, "mscale"),
        mscale_all_dim=_unless_zero(rope, "mscale_all_dim"),
        truncate=flag(rope, "truncate", True),
    )


def _unless_zero(rope: Raw, key: str) -> float | None:
    """A positive number; None where the key is missing, null or 0."""
    return None if rope.get(key) == 0 else maybe_number(rope, key)


def _read_llama3(raw: Raw, rope: Raw) -> RopeScaling:
    return Llama3Scaling(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_length=_original(raw, rope),
    )


def _read_longrope(raw: Raw, rope: Raw) -> RopeScaling:
    return LongRopeScaling(
        short_factor=numbers(rope, "short_factor"),
        long_factor=numbers(rope, "long_factor"),
        original_length=_original(raw, rope),
        factor=_factor(raw, rope),
        attention_factor=maybe_number(rope, "attention_factor"),
    )


_READERS: dict[str, Callable[[Raw, Raw], RopeScaling]] = {
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
}


def _write_yarn(scaling: YarnScaling) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.attention_factor,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
        "truncate": None if scaling.truncate else False,
    }


def _write_llama3(scaling: Llama3Scaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def _write_longrope(scaling: LongRopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": list(scaling.short_factor),
        "long_factor": list(scaling.long_factor),
        "factor": scaling.factor,
        "attention_factor": scaling.attention_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


_WRITERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    LinearScaling: lambda scaling: {"rope_type": "linear", "factor": scaling.factor},
    DynamicScaling: lambda scaling: {"rope_type": "dynamic", "factor": scaling.factor},
    YarnScaling: _write_yarn,
    Llama3Scaling: _write_llama3,
    LongRopeScaling: _write_longrope,
}


KEYS = ("quantization_config", "compression_config")
LOAD = "load it in transformers with quantization_config={}(dequantize=True), and save it again"
WAYS_OUT = {
    "fp8": ("FP8", LOAD.format("FineGrainedFP8Config")),
    "fbgemm_fp8": ("FP8", "use the bfloat16 folder that it was made from"),
    "mxfp4": ("MXFP4, as gpt-oss is published", LOAD.format("Mxfp4Config")),
    "bitsandbytes": (
        "bitsandbytes, 8 or 4 bits",
        "load it in transformers, call dequantize() and save_pretrained() it",
    ),
    "gptq": ("GPTQ", "use the unquantized folder that it was made from"),
    "awq": ("AWQ", "use the unquantized folder that it was made from"),
}
"""For each quant_method what it is, and how to get plain weights."""
OTHER = "use the unquantized folder that it was made from"
FLOAT8 = "F8_"
PACKED = (".qweight", ".weight_packed", ".weight_scale_inv", "_proj_blocks", ".quant_state.")
"""Parts of names that only quantized weights have."""


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """By the keys of config.json, those of a text model inside another included."""
    inner = raw.get("text_config")
    for keys in (raw, inner if isinstance(inner, Mapping) else {}):
        for key in KEYS:
            if not keys.get(key):
                continue
            about = keys[key]
            method = about.get("quant_method", "?") if isinstance(about, Mapping) else about
            name, way_out = WAYS_OUT.get(str(method), ("", OTHER))
            what = f"{method}: {name}" if name and name.lower() != method else str(method)
            raise ValueError(
                f"{key} says that the weights are quantized ({what}); only float weights can be "
                f"trained: {way_out}"
            )


def refuse_quantized_files(folder: str | Path) -> None:
    """By the numbers and names in its files; a folder without readable weights passes."""
    folder = Path(folder)
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            header = read_header(path)
        except (OSError, ValueError):
            continue  # the error comes when its tensors are read
        for name, entry in header.items():
            dtype = str(entry.get("dtype", "")) if isinstance(entry, dict) else ""
            if dtype.startswith(FLOAT8) or any(part in name for part in PACKED):
                raise ValueError(
                    f"{path.name} has the tensor {name} of {dtype}: its weights are quantized"
                    f"{' to FP8' if dtype.startswith(FLOAT8) else ''}; only float weights can be "
                    f"trained, so convert the folder to bfloat16, or {OTHER}"
                )


Kind = TypeVar("Kind", bound=Part)


def read_decoder(raw: Raw, layers: Sequence[LayerConfig], **more: Any) -> DecoderConfig:  # noqa: ANN401
    """The decoder around these layers. more: fields of DecoderConfig."""
    named: dict[str, Any] = {
        "vocab_size": count(raw, "vocab_size"),
        "width": count(raw, "hidden_size"),
        "layers": tuple(layers),
        "norm_eps": number(raw, "rms_norm_eps", 1e-6),
        "tied": flag(raw, "tie_word_embeddings"),
        "init_std": number(raw, "initializer_range", 0.02),
    }
    return DecoderConfig(**named | more)


def read_layers(raw: Raw) -> int:
    return count(raw, "num_hidden_layers", most=MOST_LAYERS)


def read_layer_types(raw: Raw, known: Sequence[str]) -> list[str] | None:
    """layer_types, one of the `known` kinds for each layer; None where the key is missing."""
    layers, kinds = read_layers(raw), raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types must name a kind for each of the {layers} layers")
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"layer_types has {shown(kind)}; supported are {' and '.join(known)}")
    return kinds


def read_pad_token(raw: Raw) -> int | None:
    """pad_token_id, for architectures that freeze its row; below 0 it counts from the end."""
    token, vocab_size = raw.get("pad_token_id"), count(raw, "vocab_size")
    if token is None:
        return None
    is_whole = isinstance(token, int) and not isinstance(token, bool)
    if not is_whole or not -vocab_size <= token < vocab_size:
        raise ValueError(
            f"pad_token_id is {shown(token)}; it must be null, or a token id below vocab_size, "
            f"{vocab_size}"
        )
    return int(token) % vocab_size


def decoder_keys(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        **({} if config.pad_token_id is None else {"pad_token_id": config.pad_token_id}),
    }


def read_attention(raw: Raw, *, qk_norm: bool, partial: bool = False) -> AttentionConfig:
    """partial: whether RoPE may rotate only a share of each head."""
    width, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    head_dim = _head_dim(raw, width, heads)
    return AttentionConfig(
        heads=heads,
        kv_heads=read_kv_heads(raw, heads),
        head_dim=head_dim,
        rope=read_rope(raw, head_dim if partial else None),
        qk_norm=qk_norm,
        bias=flag(raw, "attention_bias"),
        output_bias=flag(raw, "attention_bias"),
    )


def attention_keys(mixer: AttentionConfig, *, partial: bool = False) -> dict[str, Any]:
    if mixer.rope is None:
        raise ValueError("its attention has no rotary positions")
    if mixer.bias != mixer.output_bias:
        raise ValueError("only some projections of its attention have a bias")
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "attention_bias": mixer.bias,
        "attention_dropout": 0.0,
        **rope_keys(mixer.rope, mixer.head_dim, partial=partial),
    }


def rope_keys(rope: RopeConfig, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """The keys of RoPE, and max_position_embeddings where the scaling depends on it."""
    length = scaled_length(rope)
    return {
        **({"max_position_embeddings": length} if length else {}),
        **write_rope(rope, head_dim, partial=partial),
    }


def read_kv_heads(raw: Raw, heads: int) -> int:
    """As many as heads where the key is missing."""
    if raw.get("num_key_value_heads") is None:
        return heads
    kv_heads = count(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads, {heads}"
        )
    return kv_heads


def _head_dim(raw: Raw, width: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return count(raw, "head_dim")
    if width % heads:
        raise ValueError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}; give head_dim"
        )
    return width // heads


def refuse_unsupported(raw: Raw, activations: Mapping[str, Sequence[str]]) -> None:
    """Refuses what no architecture here supports. activations: the values allowed for each key."""
    for key, known in activations.items():
        if (activation := raw.get(key, known[0])) not in known:
            raise ValueError(f"{key} is {shown(activation)}; supported is {known[0]}")
    if not flag(raw, "is_causal", True):
        raise ValueError(f"is_causal is {raw['is_causal']!r}; only causal models are supported")
    for key, why in UNSUPPORTED_KEYS.items():
        if raw.get(key):
            raise ValueError(f"{key} is {shown(raw[key])}, {why}; this is not supported")
    refuse_quantized(raw)
    if flag(raw, "mlp_bias"):
        raise ValueError("mlp_bias is true; only MLPs without bias are supported")
    for key in ("attention_dropout", "hidden_dropout", "router_jitter_noise"):
        if raw.get(key):
            raise ValueError(
                f"{key} is {shown(raw[key])}; dropout and noise are not supported, so set it to 0"
            )


UNSUPPORTED_KEYS = {
    "per_layer_config": "which changes keys for some layers",
    "transformers_weights": "which names other files of weights",
    "fusion_config": "which joins tensors into others",
}
"""Keys that any config.json of transformers may have, and what they change."""

SILU = {"hidden_act": ("silu", "swish")}


def require_plain_norms(config: DecoderConfig) -> None:
    if config.zero_centred:
        raise ValueError("its norms are zero-centred")


def require_no_mtp(config: DecoderConfig) -> None:
    if config.mtp:
        raise ValueError("it has multi-token prediction, which this architecture cannot store")


def parts_of_kind(layers: Sequence[LayerConfig], field: str, kind: type[Kind]) -> list[Kind | None]:
    """The mixer or mlp of each layer; None where it is of another kind."""
    parts = (getattr(layer, field) for layer in layers)
    return [part if isinstance(part, kind) else None for part in parts]


def common_part(parts: Sequence[Kind | None], what: str) -> Kind:
    """The config that all layers with such a part share; raises if they differ or none has it."""
    present = [(i, part) for i, part in enumerate(parts) if part is not None]
    if not present:
        raise ValueError(f"it has no {what}")
    first, common = present[0]
    for i, part in present:
        if part != common:
            raise ValueError(f"layer {i} has another {what} than layer {first}")
    return common


def common_part_or_none(parts: Sequence[Kind | None], what: str) -> Kind | None:
    """The same, but None where no layer has such a part."""
    return common_part(parts, what) if any(part is not None for part in parts) else None


def bare(config: DecoderConfig) -> DecoderConfig:
    """The config without the fields that decide only how the model is trained and computed.

    pad_token_id and float32_residual are among them, and what a part leaves out (`Part.bare`).
    config.json has no keys for them, or keeps those of the base.
    """
    parts = config.map_parts(lambda part: part.bare())
    return replace(parts, pad_token_id=None, float32_residual=False)


def require_gated(mlp: MLPConfig) -> MLPConfig:
    if not mlp.gated:
        raise ValueError(f"its MLP is {mlp.activation}, without a gate")
    return mlp
