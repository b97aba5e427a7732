"""TOML out of sections of plain values; tomllib reads the same values back.

    {"train": {"lr": 0.0003, "betas": (0.9, 0.95)}}

gives, with the meaning of each key after it,

    [train]
    lr = 0.0003  # learning rate
    betas = [0.9, 0.95]  # of AdamW
"""

import json
import re
from collections.abc import Mapping

from longshore.printable import printable

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def write_toml(sections: Mapping[str, Mapping[str, object]], about: Mapping[str, str]) -> str:
    """about: what a key means, by section.key."""
    return "\n".join(
        f"[{name}]\n{_section(name, values, about)}" for name, values in sections.items()
    )


def _section(name: str, values: Mapping[str, object], about: Mapping[str, str]) -> str:
    lines = []
    for key, value in values.items():
        meaning = about.get(f"{name}.{key}")
        lines.append(f"{key} = {toml_value(value)}" + (f"  # {meaning}" if meaning else "") + "\n")
    return "".join(lines)


def toml_value(value: object) -> str:
    """One value, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's too; TOML wants one more, for the character 127, and a terminal
        # that shows it some more.
        quoted = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        return printable(quoted)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        pairs = [f"{_key(str(name))} = {toml_value(item)}" for name, item in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    raise ValueError(f"{value!r} cannot be written as TOML")


def _key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else toml_value(name)
