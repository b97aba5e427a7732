"""Rotary positions as config.json spells them, and as we do.

In: a config.json of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`). Out: a
RopeConfig, and back. The older spelling is written, which both versions read.

    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    RopeConfig(theta=500000.0, scaling=LinearScaling(factor=4.0))
"""

from collections.abc import Callable, Mapping
from typing import Any

from longshore.arch.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
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
