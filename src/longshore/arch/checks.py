"""Checks that all configs of a model share. Pure Python.

In: a config and names of its fields. Out: nothing, or a ValueError that names the field:
"AttentionConfig.heads is 0; it must be a whole number of 1 or more".
"""

import math
import operator


def check_counts(config: object, *names: str, optional: bool = False) -> None:
    """Refuses anything but whole numbers of 1 or more; None passes where it is optional."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        try:
            found = operator.index(value)
        except TypeError:
            found = 0
        if found < 1 or isinstance(value, bool):
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; it must be a whole number of "
                "1 or more"
            )
        object.__setattr__(config, name, found)


def check_more_than(least: float, config: object, *names: str, optional: bool = False) -> None:
    """Refuses anything but finite numbers above `least`; None passes where it is optional."""
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
