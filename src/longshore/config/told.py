"""Errors of the parts below, told in the words of a recipe.

In: a ValueError that says "max_cp is 8, but there are only 4 lanes". Out: one that says plan.max_cp
instead, with the key that led there in front where there is one.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

PLANNER_WORDS = re.compile(
    r"(?<![\w./-])(?:(?:capacity|policy|sync|align)(?= is |=)"
    r"|(?:cp_sizes?|min_cp|max_cp|max_sequences)(?![\w./-]))"
)


@contextmanager
def told_as(where: str = "") -> Iterator[None]:
    """where: the key, with a colon and a space behind it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(where + as_keys(str(error).removeprefix("mock data: "))) from None
    except OSError as error:
        raise ValueError(f"{where}{error.filename}: cannot be read ({error.strerror})") from None


def as_keys(message: str) -> str:
    """The planner says cp_size where a recipe has plan.cp_size."""
    said = PLANNER_WORDS.sub(lambda found: f"plan.{found[0]}", message)
    return said.replace("raise the capacity", "raise plan.capacity")
