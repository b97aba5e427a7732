"""One thing that `longshore doctor` found.

In: a mark, a text and the way out, for people. Out: frozen data that travels between ranks.

    warn("open files: 256, and 64 ranks want 768", "ulimit -n 768")
"""

from dataclasses import dataclass
from typing import Literal

Mark = Literal["ok", "warn", "bad"]
LONGEST = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """mark: ok; warn, worth a look; bad, training needs it and it is broken."""

    mark: Mark
    text: str
    way_out: str = ""


def good(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str, way_out: str = "") -> Finding:
    return Finding("warn", text, way_out)


def bad(text: str, way_out: str = "") -> Finding:
    return Finding("bad", text, way_out)


def first_line(error: object) -> str:
    """An error or a warning in one line; for an error with its type."""
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else ""
    if isinstance(error, BaseException) and not isinstance(error, Warning):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
