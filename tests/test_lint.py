"""A tree with one offence against each rule of tests/lint.py, and one with none."""

import pytest
from tests.lint import RULES, Tree, offences

MODULE = '''"""A module."""

from dataclasses import dataclass


class Plan:
    """A class."""


@dataclass
class Large:
    a: int
    """Documented."""
    b: int
    c: int
    d: int
    e: int = key("a key of a recipe")


def load():
    try:
        made = 1
    except ValueError as error:
        raise ValueError(str(error).replace("a", "b")) from None
    return made
'''
PAGE = """# How it works

Whoever goes on with `train.step_count` calls `longshore trian`, `longshore train --rank` and
`make tests`; see `plan/cost.py:cots`, `plan/coast.py:cost`, and `longshore train train.steps=many`.

```python
from longshore import make_plan
from longshore.plan import coast
```

## Three questions, three files each

### Where?
"""
README = """# Longshore

## The tree

```
docs/    the pages
src/     the sources
docs/    the pages
bench/   benchmarks
a line that is none
```
"""


@pytest.fixture
def tree(tmp_path):
    package = tmp_path / "src" / "longshore"
    for path, text in {
        package / "plan" / "__init__.py": "",
        package / "plan" / "cost.py": MODULE,
        package / "plan" / "other.py": "class Plan:\n    pass\n",
        tmp_path / "docs" / "how-it-works.md": PAGE,
        tmp_path / "README.md": README,
        tmp_path / "Makefile": "test:\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(tmp_path)


OFFENCES = """
README.md:5: the tree has no line for src/longshore/plan/
README.md:8: docs/ does not exist, or stands here twice
README.md:9: bench/ does not exist, or stands here twice
README.md:10: a line of the tree is: path, two spaces, role
docs/how-it-works.md:3: there is no command trian
docs/how-it-works.md:3: there is no key train.step_count
docs/how-it-works.md:3: train has no --rank
docs/how-it-works.md:3: “goes on with” is not the field's English
docs/how-it-works.md:4: make has no target tests
docs/how-it-works.md:4: plan/cost.py has no cots
docs/how-it-works.md:4: there is no file plan/coast.py
docs/how-it-works.md:4: train.steps is 'many'; it must be a whole number, 0 or more
docs/how-it-works.md:8: longshore.plan.coast is not public
docs/how-it-works.md:11: 1 questions instead of three
docs/how-it-works.md:11: “Where?” names 0 files, not one to three
src/longshore/plan/cost.py:14: Large.b has no line of documentation under it
src/longshore/plan/cost.py:15: Large.c has no line of documentation under it
src/longshore/plan/cost.py:16: Large.d has no line of documentation under it
src/longshore/plan/cost.py:22: `made` says nothing: name the thing
src/longshore/plan/cost.py:24: rewrites the text of an error
src/longshore/plan/other.py:1: a class Plan exists in src/longshore/plan/cost.py too
"""


def test_every_rule_notices_an_offence_with_its_line(tree):
    assert offences(tree) == OFFENCES.strip().splitlines()
    assert [rule.__name__ for rule in RULES if not list(rule(tree))] == []
