"""Kinds of values: what a key of a recipe may be, and its description for errors and docs.

In: a value as TOML gives it. Out: the value as the dataclass holds it, or None where it is of
another kind (TOML has no None of its own). `whole(1, 64)` takes 8, refuses 8.0, true and 65, and
says "a whole number from 1 to 64".
"""

import math
import re
import tomllib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longshore.choices import names_of
from longshore.user_code import FUNCTION_NAME, MODULE_NAME

LARGEST = 2**40


@dataclass(frozen=True, slots=True)
class Kind:
    """What values a key takes."""

    wants: str
    """The values, as text for errors."""
    read: Callable[[object], Any]
    """The value as the dataclass has it; None if it is of another kind."""
    names: tuple[str, ...] = ()
    """All names that it takes, for a choice."""
    is_text: bool = False
    """Whether every value on the command line is a string."""


def key(default: object, kind: Kind, about: str) -> Any:  # noqa: ANN401 - the type of the default
    """A field of a section: its default, its kind and what it means; names it takes are listed."""
    listed = f"{about} ({kind.wants})" if kind.names else about
    return field(default=default, metadata={"kind": kind, "about": listed})


def whole(least: int = 1, most: int = LARGEST) -> Kind:
    def read(value: object) -> int | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return value if fits and isinstance(value, int) else None

    limits = f", {least} or more" if most == LARGEST else f" from {least} to {most}"
    return Kind(f"a whole number{limits}", read)


def number(least: float, most: float = math.inf, *, above: bool = False) -> Kind:
    """A finite number from `least` to `most`, or only above `least`."""

    def read(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        fits = least <= value <= most and math.isfinite(value) and not (above and value == least)
        return float(value) if fits else None

    low = f"above {least:g}" if above else f"of at least {least:g}"
    return Kind(f"a number {low}" + (f", at most {most:g}" if most < math.inf else ""), read)


def flag() -> Kind:
    return Kind("true or false", lambda value: value if isinstance(value, bool) else None)


def flag_or(name: str) -> Kind:
    def read(value: object) -> object:
        return name if value == name else flag().read(value)

    return Kind(f"true, false or {name!r}", read)


def text() -> Kind:
    return Kind("a string", lambda value: value if isinstance(value, str) else None, is_text=True)


def choice(*names: str) -> Kind:
    return Kind(listed(names), lambda value: value if value in names else None, names, True)


def one_of(literal: Any) -> Kind:  # noqa: ANN401 - Literal types have no type
    """One of a Literal's names; choices.py lists them."""
    return choice(*names_of(literal))


def function(*names: str) -> Kind:
    """A name, or a function of the user's as module:function."""

    def read(value: object) -> str | None:
        given = isinstance(value, str) and (value in names or FUNCTION_NAME.fullmatch(value))
        return value if given and isinstance(value, str) else None

    shown = [name for name in names if name]
    return Kind(listed([*shown, "module:function"]), read, tuple(shown), True)


def module() -> Kind:
    """A module of the user's, alone or with something in it as module:name."""

    def read(value: object) -> str | None:
        given = isinstance(value, str) and (not value or MODULE_NAME.fullmatch(value))
        return value if given and isinstance(value, str) else None

    return Kind("module:name, or a module alone", read, is_text=True)


def whole_or(name: str) -> Kind:
    def read(value: object) -> object:
        return name if value == name else whole().read(value)

    return Kind(f"{whole().wants}, or {name!r}", read)


def steps_or_share() -> Kind:
    """A whole number of steps, or a share of all of them: 100, or 0.03."""

    def read(value: object) -> object:
        if isinstance(value, float):
            return value if 0 < value < 1 else None
        return whole(0).read(value)

    return Kind(
        "a whole number of steps, or a share of all steps above 0 and below 1, such as 0.03", read
    )


def number_or(name: str, least: float) -> Kind:
    def read(value: object) -> object:
        return name if value == name else number(least).read(value)

    return Kind(f"{number(least).wants}, or {name!r}", read)


def texts() -> Kind:
    """Texts as a list; a,b is a list of two, and a bare word a list of one."""

    def read(value: object) -> tuple[str, ...] | None:
        items = split_list(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            return None
        return tuple(items) if all(items) else None

    return Kind('a list of strings, such as ["a", "b"] or a,b', read)


def paths() -> Kind:
    """One path, or several as a list or with commas, unless a path with commas is there."""

    def read(value: object) -> str | tuple[str, ...] | None:
        if isinstance(value, str) and not (value.startswith("[") and value.endswith("]")):
            if "," not in value:
                return value
            value = [value] if Path(value).exists() else value
        items = texts().read(_toml_list(value) if isinstance(value, str) else value)
        # One path with commas stays a list, so that it is not split where it is read again.
        is_one = items is not None and len(items) == 1 and "," not in items[0]
        return items[0] if items and is_one else items or None

    return Kind('a string, or a list of strings such as ["a", "b"] or a,b', read, is_text=True)


def _toml_list(text: str) -> object:
    """The list that a text in brackets is; the text itself where its items have no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def numbers() -> Kind:
    """Numbers above 0, as a list; 3,1 is a list of two."""

    def read(value: object) -> tuple[float, ...] | None:
        if isinstance(value, str):
            value = _toml_list(f"[{value}]")
        if not isinstance(value, list | tuple):
            return None
        items = [number(0, above=True).read(item) for item in value]
        return None if None in items else tuple(items)

    return Kind("a list of numbers above 0, such as [3, 1] or 3,1", read)


def split_list(text: str) -> list[str]:
    """The texts between commas; brackets around all and quotes around each may be there or not."""
    bare = text.strip()
    if bare[:1] == "[" and bare[-1:] == "]":
        bare = bare[1:-1].strip()
    items = [item.strip() for item in bare.split(",")] if bare else []
    return [item[1:-1] if re.fullmatch(r"""(["']).*\1""", item) else item for item in items]


def shares() -> Kind:
    """Two numbers of at least 0 and below 1."""

    def read(value: object) -> tuple[float, float] | None:
        if not isinstance(value, list | tuple) or len(value) != 2:
            return None
        first, second = (number(0, 1).read(item) for item in value)
        return (first, second) if None not in (first, second) and max(first, second) < 1 else None

    return Kind("two numbers of at least 0 and below 1, such as [0.9, 0.95]", read)


def table() -> Kind:
    return Kind("a table", lambda value: dict(value) if isinstance(value, dict) else None)


def listed(names: Seq[str], last: str = "or") -> str:
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else names[0]
