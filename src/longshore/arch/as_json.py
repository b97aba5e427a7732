"""Our configs as JSON, and back. No torch.

In: a frozen dataclass of MODULES. Out: an object that names its class under `kind`:

    config_to_json(MLPConfig(width=192))                      {"kind": "MLPConfig", "width": 192}
    config_from_json({"kind": "MLPConfig", "width": 192})     MLPConfig(width=192)

A new class in one of MODULES needs nothing here.
"""

from dataclasses import fields, is_dataclass
from typing import Any

from longshore.arch import attention, decoder, feed_forward, rope, scan
from longshore.arch.decoder import DecoderConfig

MODULES = (decoder, attention, feed_forward, rope, scan)


def config_to_json(decoder: DecoderConfig) -> dict[str, Any]:
    data = _to_json(decoder)
    assert isinstance(data, dict)
    return data


def config_from_json(data: Any) -> DecoderConfig:  # noqa: ANN401
    """The decoder config; raises ValueError for an unknown kind or field, or a wrong value."""
    try:
        config = _from_json(data)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"it must be a DecoderConfig, and is {type(config).__name__}")
    return config


def _to_json(value: Any) -> Any:  # noqa: ANN401
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
        return {"kind": type(value).__name__, **parts}
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    assert value is None or isinstance(value, bool | int | float | str)
    return value


def _from_json(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    name = value.get("kind")
    kind = next((vars(module)[name] for module in MODULES if name in vars(module)), None)
    if not isinstance(kind, type) or not is_dataclass(kind):
        raise ValueError(f"kind is {name!r}, which is no config of this version of Longshore")
    parts = {key: _from_json(item) for key, item in value.items() if key != "kind"}
    if unknown := sorted(parts.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{name} has no field {unknown[0]} in this version of Longshore")
    try:
        return kind(**parts)
    except TypeError as error:
        raise ValueError(f"{name} cannot be created: {error}") from None
