"""Every choice of a recipe, listed once; the parts that act on it read it from here. No torch.

In: nothing. Out: Literal types, for annotations, and `names_of`, for checks and for help:

    names_of(Recompute)     ("none", "blocks")

config/schema.py explains the names. Policies are registered in plan/types.py.

Errors that name settings as data, so that each front end spells them in its own way.

In: a message in which {name} is a setting and {name:value} a setting with a value, and values for
the other placeholders. Out: a ValueError that says it in Python's words, and `spelled` for a
recipe or the command line:

    error = SettingError("{max_cp} is {given}, but there are only {count} lanes", given=8, count=4)
    str(error)                                        max_cp is 8, but there are only 4 lanes
    error.spelled(lambda name: f"plan.{name}")        plan.max_cp is 8, but there are only 4 lanes
    error.spelled(as_option)                          --max-cp is 8, but there are only 4 lanes

"lower {max_cp:4}" is "lower max_cp=4" in Python, and "lower --max-cp 4" on the command line.

Checks of numbers, shared by all configs of a model. Pure Python.

In: a config and names of its fields. Out: nothing, or a ValueError that names the field:
"AttentionConfig.heads is 0; it must be a whole number of 1 or more".
"""

import math
import operator
from collections.abc import Callable, Iterable
from string import Formatter
from typing import Any, Literal, get_args

ModelCode = Literal["longshore", "transformers"]

LossOn = Literal["assistant", "all"]
TooLong = Literal["reject", "truncate"]

Sync = Literal["round", "step"]
CPSizes = Literal["pow2", "any"]

ShardMode = Literal["zero3", "zero2", "none"]
ShardChoice = Literal["auto", ShardMode]
AttentionKind = Literal["auto", "gather", "heads"]
ScanKind = Literal["auto", "heads", "states"]

ScheduleName = Literal["cosine", "linear", "constant"]
DTypeChoice = Literal["auto", "bfloat16", "float32", "float64"]
Recompute = Literal["none", "blocks"]
Kernels = Literal["auto", "plain"]
LossName = Literal["cross_entropy", "dpo", "grpo", "ppo", "distill"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
GraphLayer = Literal["attention", "mamba", "delta", "mlp"]
DisplayChoice = Literal["auto", "live", "plain", "none"]


def names_of(choice: Any) -> tuple[str, ...]:  # noqa: ANN401 - Literal types have no type
    """The names of one of the types above, in their order."""
    names: tuple[str, ...] = get_args(choice)
    assert names, choice
    return names


Spelling = Callable[..., str]
"""How a front end writes a setting: takes its name and, where the message has one, its value."""


class SettingError(ValueError):
    """A ValueError about settings; a {name} of its message that has no value is a setting."""

    def __init__(self, message: str, /, **values: object) -> None:
        self.message = message
        self.values = values
        super().__init__(self.spelled(in_python))

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self.message, self.values)

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings it is about, each once, in the order of the message."""
        return _settings(self.message, self.values)

    def spelled(self, spell: Spelling, /, **values: object) -> str:
        """The message with each setting as `spell` writes it. values: replace its own."""
        return spell_settings(self.message, spell, **{**self.values, **values})

    def after(self, start: str) -> "SettingError":
        """The same error with words in front of it, such as the file and line it is about."""
        plain = start.replace("{", "{{").replace("}", "}}")
        return type(self)(plain + self.message, **self.values)


def spell_settings(message: str, spell: Spelling, /, **values: object) -> str:
    """A message with its values, and each setting as `spell` writes it."""
    settings = {name: _Setting(name, spell) for name in _settings(message, values)}
    return message.format(**values, **settings)


def as_option(name: str, value: str = "") -> str:
    """A setting as the command line spells it: max_cp is --max-cp."""
    option = f"--{name.replace('_', '-')}"
    return f"{option} {value}" if value else option


def in_python(name: str, value: str = "") -> str:
    """A setting as a call spells it."""
    return f"{name}={value}" if value else name


class _Setting:
    """A setting in a message; the format spec, after the colon, is its value."""

    def __init__(self, name: str, spell: Spelling) -> None:
        self.name = name
        self.spell = spell

    def __format__(self, value: str) -> str:
        return self.spell(self.name, value) if value else self.spell(self.name)


def _settings(message: str, values: Iterable[str]) -> tuple[str, ...]:
    names = [name for _, name, _, _ in Formatter().parse(message) if name]
    return tuple(dict.fromkeys(name for name in names if name not in values))


def _restored(kind: type[SettingError], message: str, values: dict[str, object]) -> SettingError:
    return kind(message, **values)


def check_counts(config: object, *names: str, optional: bool = False) -> None:
    """Raises for anything but whole numbers of 1 or more; None passes if it is optional."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        try:
            count = operator.index(value)
        except TypeError:
            count = 0
        if count < 1 or isinstance(value, bool):
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; it must be a whole number of "
                "1 or more"
            )
        object.__setattr__(config, name, count)


def check_more_than(least: float, config: object, *names: str, optional: bool = False) -> None:
    """Raises for anything but finite numbers above `least`; None passes if it is optional."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        if not is_positive(value) or value <= least:
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; it must be a finite number above "
                f"{least:g}"
            )


def is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # an int beyond all floats
        return False
