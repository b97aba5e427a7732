"""Keys of a config.json, read with their types checked.

In: a dict, as json.load gives it. Out: ints, floats and flags, or a ValueError that names the key.

    count({"hidden_size": 64}, "hidden_size")    64
    count({"hidden_size": "64"}, "hidden_size")  ValueError: hidden_size is '64'; …
"""

from collections.abc import Mapping
from typing import Any, NoReturn

Raw = Mapping[str, Any]


def count(raw: Raw, key: str, *, least: int = 1) -> int:
    """A whole number of `least` or more."""
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(raw, key, f"a whole number of {least} or more")
    return value


def number(raw: Raw, key: str, default: float | None = None) -> float:
    """A positive number; `default` where the key is missing or null."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        _refuse(raw, key, "a number above 0")
    return float(value)


def maybe_number(raw: Raw, key: str) -> float | None:
    """A positive number, or None where the key is missing or null."""
    return None if raw.get(key) is None else number(raw, key)


def flag(raw: Raw, key: str, default: bool = False) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        _refuse(raw, key, "true or false")
    return value


def numbers(raw: Raw, key: str) -> tuple[float, ...]:
    """A list of positive numbers."""
    values = raw.get(key)
    if not isinstance(values, list) or not values:
        _refuse(raw, key, "a list of numbers")
    return tuple(number({key: value}, key) for value in values)


def _refuse(raw: Raw, key: str, wanted: str) -> NoReturn:
    state = f"is {raw[key]!r}" if key in raw else "is missing"
    raise ValueError(f"{key} {state}; it must be {wanted}")
