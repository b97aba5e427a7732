"""The user's own code, named in a recipe or on the command line as module:name. No torch.

In: "mine:weighted", and the setting that names it. Out: what has this name in mine.py, which is in
the working folder, on PYTHONPATH or installed; or a ValueError of one line:

    load_function("mine:weighted", "loss")
        loss: there is no module mine; start in the folder that contains it, …
        loss: importing mine raised KeyError: 'heads' (mine.py, line 12)
        loss: mine has no weighted; define it in /home/ada/mine.py as a function
        loss: mine:weighted is not a function but of type int
"""

import importlib
import importlib.util
import re
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = r"[^\W\d]\w*"
FUNCTION_NAME = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")  # package.module:function
MODULE_NAME = re.compile(rf"{_NAME}(\.{_NAME})*(:{_NAME})?")  # package.module, or as above
NOT_USERS = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<")
"""How the names of files begin that are Longshore's or Python's."""


def load_function(name: str, key: str) -> Callable[..., Any]:
    """The function "module:function"; key: of the recipe, for errors."""
    if not FUNCTION_NAME.fullmatch(name):
        own = key.rpartition(".")[2]
        raise ValueError(f"{key} is {name!r}; it must be module:function, such as mine:{own}")
    value = load_object(name, key, wanted="a function")
    if not callable(value):
        raise ValueError(f"{key}: {name} is not a function but of type {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def load_object(name: str, key: str, *, wanted: str) -> Any:  # noqa: ANN401 - the user's
    """What "module:name" names; wanted: what it should be, for errors."""
    module = load_module(name, key)
    attribute = name.partition(":")[2]
    try:
        return getattr(module, attribute)
    except AttributeError:
        file = getattr(module, "__file__", None) or "its package"
        raise ValueError(
            f"{key}: {module.__name__} has no {attribute}; define it in {file} as {wanted}"
        ) from None


def load_module(name: str, key: str) -> ModuleType:
    """Imports the module of "module:name" or "module"."""
    path = name.partition(":")[0]
    try:
        return importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}."):
            raise _no_module(path, key) from None
        raise ValueError(f"{key}: importing {path} raised {describe_error(error)}") from error


def check_module_exists(name: str, key: str) -> None:
    """Refuses a module whose top package cannot be found, without importing anything."""
    path = name.partition(":")[0]
    if importlib.util.find_spec(path.partition(".")[0]) is None:
        raise _no_module(path, key)


@lru_cache
def is_installed(package: str) -> bool:
    """Whether a package is there; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def describe_error(error: Exception) -> str:
    """The error in one line, with the place in the user's file."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not frame.filename.startswith(NOT_USERS)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _no_module(path: str, key: str) -> ValueError:
    return ValueError(
        f"{key}: there is no module {path}; start in the folder that contains it, add that folder "
        "to PYTHONPATH, or install it"
    )
