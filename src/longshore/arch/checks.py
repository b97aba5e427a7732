"""Checks of numbers, shared by all configs of a model. Pure Python.

In: a config and names of its fields. Out: nothing, or a ValueError that names the field:
"AttentionConfig.heads is 0; it must be a whole number of 1 or more".
"""

import math
import operator


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
