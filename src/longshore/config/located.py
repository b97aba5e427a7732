"""Errors of other packages, spelled for a recipe: each setting as its key, with its place.

In: errors that name settings as data (settings.py). Out: a ValueError of one line. What `prepare`
calls max_bytes is data.max_bytes in a recipe, and what is wrong with a file is said of its key:

    with in_keys("data.path"):
        find_inputs(["chats.txt"])      data.path: chats.txt: must end in .jsonl, …
    with in_keys():
        prepare(…, max_bytes=0)         data.max_bytes is 0; it must be at least 1
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields

from longshore.config.schema import SECTIONS
from longshore.settings import SettingError

WITHOUT_KEY = {"start_over": "remove the folder"}
"""What has no key, and what to do instead."""
_IS_HELD_OUT = ContextVar("_IS_HELD_OUT", default=False)


@contextmanager
def settings_in_keys(**values: object) -> Iterator[None]:
    """Errors about settings name keys; all others pass. values: replace those of the error."""
    try:
        yield
    except SettingError as error:
        raise ValueError(error.spelled(as_key, **values)) from None


@contextmanager
def in_keys(key: str = "") -> Iterator[None]:
    """Errors of the block name keys, and begin with this one; an OSError becomes a ValueError."""
    start = f"{data_key(key)}: " if key else ""
    try:
        with settings_in_keys():
            yield
    except ValueError as error:
        raise ValueError(f"{start}{error}") from None
    except OSError as error:
        raise ValueError(f"{start}{error.filename}: cannot be read ({error.strerror})") from None


@contextmanager
def of_held_out() -> Iterator[None]:
    """In this block held-out data are read as a run's data are, and errors name their keys."""
    token = _IS_HELD_OUT.set(True)
    try:
        yield
    finally:
        _IS_HELD_OUT.reset(token)


def data_key(key: str = "data.path") -> str:
    """The key, or in a block of held-out data the one that took its place: data.eval_path."""
    is_other = _IS_HELD_OUT.get() and key in ("data.path", "data.mock")
    return key.replace("data.", "data.eval_") if is_other else key


def as_key(name: str, value: str = "") -> str:
    """A setting as a recipe spells it: max_cp is plan.max_cp, with a value plan.max_cp=8.

    A name that two sections have is the first section's; graph_layers is graph.layers.
    """
    keys = [f"{section}.{name}" for section, kind in SECTIONS.items() if name in _names(kind)]
    section, _, rest = name.partition("_")
    if not keys and section in SECTIONS and rest in _names(SECTIONS[section]):
        keys = [f"{section}.{rest}"]
    key = keys[0] if keys else WITHOUT_KEY.get(name, name)
    return f"{key}={value}" if value else key


def _names(section: type) -> list[str]:
    return [field.name for field in fields(section)]
