"""Settings in errors, spelled as keys of a recipe.

In: a SettingError of the planner, such as "{max_cp} is 8, but there are only 4 lanes". Out: a
ValueError that says "plan.max_cp is 8, …". What is no key of the section keeps its name.

    with as_recipe_keys("plan"):
        make_plan(lengths, max_cp=8, lanes=4, capacity=1024)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from longshore.config.schema import SECTIONS
from longshore.errors import SettingError


@contextmanager
def as_recipe_keys(section: str, key: str = "", **values: object) -> Iterator[None]:
    """key: whose value is wrong, said in front. values: said in place of the error's own."""
    names = {field.name for field in fields(SECTIONS[section])}
    front = f"{section}.{key}: " if key else ""

    def spell(name: str) -> str:
        return f"{section}.{name}" if name in names else name

    try:
        yield
    except SettingError as error:
        raise ValueError(front + error.spelled(spell, **values)) from error
    except ValueError as error:
        if not front:
            raise
        raise ValueError(f"{front}{error}") from error
