"""Our configs as JSON, and back; a user's own too, once it is registered. No torch.

In: a frozen dataclass of this package called …Config or …Scaling, or one given to
`register_config`. Out: an object that names its class under `kind`, and for a user's class also the
Python module it comes from:

    config_to_json(MLPConfig(width=192))                      {"kind": "MLPConfig", "width": 192}
    config_from_json({"kind": "MLPConfig", "width": 192})     MLPConfig(width=192)
    {"kind": "MeanConfig", "module": "mine"}                  MeanConfig(), if mine was imported

A new class of this package needs no registration. Reading never imports a user's code: the caller
imports the modules of users' classes first.
"""

from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from longshore import arch
from longshore.arch.decoder import DecoderConfig

RESERVED = ("kind", "module")
OURS: dict[str, type] = {
    name: kind
    for module in iter_modules(arch.__path__, "longshore.arch.")
    if module.name != __name__
    for name, kind in vars(import_module(module.name)).items()
    if name.endswith(("Config", "Scaling")) and isinstance(kind, type) and is_dataclass(kind)
}
REGISTERED: dict[str, type] = {}
"""Classes of users by name: those of their mixers and feed-forward parts, and what these hold."""


def register_config(kind: type) -> None:
    """Lets configs of a user's class be saved and read back; a name can be registered once.

    A class may be registered again by the same module, as when that is reloaded.
    """
    name = kind.__name__
    if not is_dataclass(kind):
        raise ValueError(f"{name} is not a dataclass; a config is a frozen dataclass")
    if clash := [field.name for field in fields(kind) if field.name in RESERVED]:
        raise ValueError(f"{name} has a field {clash[0]}, which its JSON needs; rename the field")
    taken = OURS.get(name) or REGISTERED.get(name)
    if taken is not None and taken.__module__ != kind.__module__:
        raise ValueError(
            f"the name {name} is taken by a config of {taken.__module__}; rename the class"
        )
    REGISTERED[name] = kind


def config_to_json(decoder: DecoderConfig) -> dict[str, Any]:
    """The config as JSON; ValueError for a class that is not registered or a value JSON lacks."""
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
        raise ValueError(f"it is {type(config).__name__}; it must be a DecoderConfig")
    return config


def _to_json(value: Any, where: str = "a decoder") -> Any:  # noqa: ANN401
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        parts = {
            field.name: _to_json(getattr(value, field.name), f"{kind.__name__}.{field.name}")
            for field in fields(value)
        }
        return {**_named(kind), **parts}
    if isinstance(value, tuple):
        return [_to_json(item, where) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{where} is a {type(value).__name__}, which cannot be saved as JSON; use numbers, "
        "strings, None, tuples and registered configs"
    )


def _named(kind: type) -> dict[str, str]:
    name = kind.__name__
    if OURS.get(name) is kind:
        return {"kind": name}
    if REGISTERED.get(name) is kind:
        return {"kind": name, "module": kind.__module__}
    raise ValueError(
        f"{name} is not registered, so it can be neither trained nor saved; call register_mixer, "
        "or register_config for a config inside one, in the file of the class"
    )


def _from_json(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = _kind(value)
    parts = {key: _from_json(item) for key, item in value.items() if key not in RESERVED}
    if unknown := sorted(parts.keys() - {field.name for field in fields(kind)}):
        where = "in this version of " + ("Longshore" if "module" not in value else "its module")
        raise ValueError(f"{kind.__name__} has no field {unknown[0]} {where}")
    try:
        return kind(**parts)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{kind.__name__} cannot be created: {error}") from None


def _kind(value: dict[str, Any]) -> Any:  # noqa: ANN401 - a dataclass
    name, module = value.get("kind"), value.get("module")
    kinds = OURS if module is None else REGISTERED
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is not None:
        return kind
    if not isinstance(module, str) or not all(map(str.isidentifier, module.split("."))):
        raise ValueError(f"kind is {name!r}, which this version of Longshore does not know")
    raise ValueError(
        f"it uses {name!r} of the Python module {module!r}, which was not imported, because "
        f"reading a folder never runs code; name it: model.module={module} in a recipe, "
        f"--module {module} for longshore export"
    )
