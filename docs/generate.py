"""What docs/ generates from the code: the keys of configuration.md, api.md, a drawing of a step.

In: the page with its two marks. Out: the same page with a table for each section between them,
from config/schema.py; api.md from the public names (api_reference.py); drawings/step.svg as
draw_plan.py draws it; and whether the page changed is printed. A test fails while one is stale:

    python docs/generate.py
"""

import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from longshore.config.schema import SECTIONS, toml_value
from longshore.plan.types import POLICIES

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- keys: written by docs/generate.py -->", "<!-- end of keys -->"
HEAD = "| key | means | takes | default |\n|---|---|---|---|\n"


def with_keys(page: str) -> str:
    """The page, its keys as the code has them now."""
    assert BEGIN in page, PAGE
    assert END in page, PAGE
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{keys()}\n{END}{after}"


def keys() -> str:
    parts = []
    for name, kind in SECTIONS.items():
        rows = "".join(_row(name, field) for field in fields(kind))
        about = (kind.__doc__ or "").strip()
        parts.append(f"## {name}\n\n{about}\n\n{HEAD}{rows}")
        if name == "plan":
            parts.append(policies())
    return "\n".join(parts)


def policies() -> str:
    """The registered policies that a recipe can name."""
    rows = "".join(f"| `{policy.name}` | {policy.about} |\n" for policy in POLICIES.values())
    own = "| `module:function` | [a policy of your own](adding-a-policy.md) |\n"
    return f"| policy | what it does |\n|---|---|\n{rows}{own}"


def _row(section: str, field: Field[Any]) -> str:
    wants = field.metadata["kind"].wants
    about = field.metadata["about"].removesuffix(f" ({wants})")
    cells = (f"`{section}.{field.name}`", about, _takes(wants), _default(field))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _takes(wants: str) -> str:
    """Limits that stand for "any" say nothing."""
    return wants.replace(f" to {1 << 20}", " up").replace(f" to {2**63 - 1}", " up")


def _default(field: Field[Any]) -> str:
    default = {} if field.default is MISSING else field.default
    if default in ("", (), {}):
        return ""
    return f"`{toml_value(default)}`"


if __name__ == "__main__":
    import api_reference  # beside this file
    from draw_plan import DRAWING, drawing

    api_reference.PAGE.write_text(api_reference.page(), encoding="utf-8")
    DRAWING.write_text(drawing(), encoding="utf-8")
    old = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_keys(old), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: {'unchanged' if with_keys(old) == old else 'written anew'}\n")
