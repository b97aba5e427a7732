"""A model of the user's own: what model.module names. Torch-free, as far as the user's file is.

In: "mine:decoder", where mine.py lies in the working folder or on PYTHONPATH. Out: the
DecoderConfig that stands there under that name, or that the function of that name returns; or a
ValueError of one line that says what went wrong in which line of the file:

    model.module: mine:decoder raised KeyError: 'heads' (mine.py, line 12)

Importing the module is also what registers its mixers, so that folders with them can be read.
"""

import importlib
import traceback
from pathlib import Path
from types import ModuleType

import longshore
from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig

NOT_THEIRS = (str(Path(longshore.__file__).parent), str(Path(importlib.__file__).parent), "<")


def named_decoder(name: str) -> DecoderConfig:
    """The decoder that "module:name" is, or returns; it can be saved and read back."""
    _, _, attribute = name.partition(":")
    module = import_module(name)
    if not hasattr(module, attribute):
        where = getattr(module, "__file__", None) or "no file"
        raise ValueError(
            f"model.module: {module.__name__} has no {attribute} (it is {where}); write a function "
            f"{attribute}() that returns a DecoderConfig"
        )
    value, verb = getattr(module, attribute), "is"
    if callable(value):
        verb = "returned"
        try:
            value = value()
        except Exception as error:
            raise ValueError(f"model.module: {name} raised {_told(error)}") from error
    if not isinstance(value, DecoderConfig):
        raise ValueError(
            f"model.module: {name} {verb} a {type(value).__name__}; it must be a DecoderConfig, "
            "or a function without arguments that returns one"
        )
    _check_saved(value, name)
    return value


def import_module(name: str, key: str = "model.module: ") -> ModuleType:
    """The module of "module:name" or "module"; key: what named it, for errors."""
    path = name.partition(":")[0]
    try:
        return importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{key}there is no module {path}; start where it lies, or install it"
            ) from None
        raise ValueError(f"{key}importing {path} raised {_told(error)}") from error


def _check_saved(decoder: DecoderConfig, name: str) -> None:
    """Refuses before the first step what could not be saved after the last."""
    try:
        read_back = config_from_json(config_to_json(decoder))
    except ValueError as error:
        raise ValueError(f"model.module: {name}: {error}") from None
    if read_back != decoder:
        raise ValueError(
            f"model.module: {name}: its config does not read back as the same from JSON; make its "
            "classes dataclasses that are compared by their fields, with @dataclass(frozen=True)"
        )


def _told(error: Exception) -> str:
    """The error in one line, with the place in the user's file."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(NOT_THEIRS)
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
