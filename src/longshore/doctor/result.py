"""A finding of `longshore doctor`.

In: a mark, a text and advice. Out: frozen data, which ranks send to each other.

    warn("open files: the limit is 256, but 64 ranks need 768", "ulimit -n 768")
"""

from dataclasses import dataclass
from typing import Literal

Mark = Literal["ok", "warn", "bad"]
LONGEST = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a probe."""

    mark: Mark
    """ok, warn, or bad: broken, and training needs it."""
    text: str
    way_out: str = ""
    """Advice."""


def good(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str, way_out: str = "") -> Finding:
    return Finding("warn", text, way_out)


def bad(text: str, way_out: str = "") -> Finding:
    return Finding("bad", text, way_out)


def first_line(error: object) -> str:
    """An error or a warning in one line; an error with its type."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else ""
    if isinstance(error, BaseException) and not isinstance(error, Warning):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
