"""Keys of a config.json, read with their types checked.

In: a dict, as json.load gives it. Out: ints, floats and flags, or a ValueError that names the key.

    count({"hidden_size": 64}, "hidden_size")    64
    count({"hidden_size": "64"}, "hidden_size")  ValueError: hidden_size is '64'; …

A flag that is null is false, as it is for transformers.
"""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

Raw = Mapping[str, Any]
LARGEST = 2**31 - 1
SHOWN = 80
"""Characters of a value that a message shows."""


def count(raw: Raw, key: str, *, least: int = 1, most: int = LARGEST) -> int:
    """A whole number from `least` to `most`."""
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(raw, key, f"a whole number of {least} or more")
    if value > most:
        _refuse(raw, key, f"a whole number of at most {most}")
    return value


def number(raw: Raw, key: str, default: float | None = None) -> float:
    """A positive number; `default` where the key is missing or null."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        _refuse(raw, key, "a number above 0")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if math.isinf(real):
        _refuse(raw, key, "a finite number")
    return real


def maybe_number(raw: Raw, key: str) -> float | None:
    """A positive number, or None where the key is missing or null."""
    return None if raw.get(key) is None else number(raw, key)


def flag(raw: Raw, key: str, default: bool = False) -> bool:
    """`default` where the key is missing, false where it is null."""
    value = raw.get(key, default)
    if value is None:
        return False
    if not isinstance(value, bool):
        _refuse(raw, key, "true or false")
    return value


def numbers(raw: Raw, key: str) -> tuple[float, ...]:
    """A list of positive numbers."""
    values = raw.get(key)
    if not isinstance(values, list) or not values:
        _refuse(raw, key, "a list of numbers")
    return tuple(number({key: value}, key) for value in values)


def shown(value: object) -> str:
    """A value for a message: its beginning, where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of too many digits, or lists in lists
        return "too large to show"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _refuse(raw: Raw, key: str, wanted: str) -> NoReturn:
    state = f"is {shown(raw[key])}" if key in raw else "is missing"
    raise ValueError(f"{key} {state}; it must be {wanted}")
