"""Errors that name settings as data, so that each front end spells them in its own way.

In: a message in which {name} stands for a setting, and values for the other places. Out: a
ValueError that says it in Python's words, and `spelled` for a recipe or the command line:

    error = SettingError("{max_cp} is {given}, but there are only {count} lanes", given=8, count=4)
    str(error)                                        max_cp is 8, but there are only 4 lanes
    error.spelled(lambda name: f"plan.{name}")        plan.max_cp is 8, but there are only 4 lanes
    error.spelled(as_option)                          --max-cp is 8, but there are only 4 lanes
"""

from collections.abc import Callable
from string import Formatter


class SettingError(ValueError):
    """A ValueError about settings; a {name} of its message that has no value is a setting."""

    def __init__(self, message: str, **values: object) -> None:
        self.message = message
        self.values = values
        super().__init__(self.spelled(str))

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self.message, self.values)

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings it is about, each once, in the order of the message."""
        names = [name for _, name, _, _ in Formatter().parse(self.message) if name]
        return tuple(dict.fromkeys(name for name in names if name not in self.values))

    def spelled(self, spell: Callable[[str], str], **values: object) -> str:
        """The message with each setting as `spell` has it; values: said in place of its own."""
        settings = {name: spell(name) for name in self.settings}
        return self.message.format(**{**self.values, **values, **settings})


def _restored(kind: type[SettingError], message: str, values: dict[str, object]) -> SettingError:
    return kind(message, **values)


def as_option(name: str) -> str:
    """A setting as the command line spells it: max_cp is --max-cp."""
    return f"--{name.replace('_', '-')}"
