"""The words of the code: one class for a name, names that say something, documented fields."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src" / "longshore").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("recipes/*.md")])
VAGUE = {"made", "found", "told", "held", "seen", "got", "strange"}
PRIVATE_ENGLISH = re.compile(
    r"\b(go(es)? on (with|in|after|from|where|by)|gone on with|that there are not|dear(er|est)?)\b"
)
MOST_UNDOCUMENTED = 4
NAMED_AS_WHAT_THEY_MAKE = {"Dense", "Patterned", "RunConfig"}
"""Fields of presets are those of the configs they make, those of RunConfig the sections."""


def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def where(path, node):
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_a_class_name_exists_once():
    places = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(where(path, node))
    assert {name: at for name, at in places.items() if len(at) > 1} == {}


def test_names_say_what_they_name():
    vague = [
        f"{where(path, node)} {name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if (name := bound_name(node)) in VAGUE
    ]
    assert vague == []


def bound_name(node):
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    return None


def is_dataclass(node):
    return isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def undocumented(node):
    """Fields of a dataclass that have no string below them, and are no keys of a recipe."""
    fields = []
    for item, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or "ClassVar" in ast.unparse(item.annotation):
            continue
        is_documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        is_key = item.value is not None and re.search(r"\bkey\(|about", ast.unparse(item.value))
        fields.append((item.target.id, is_documented or is_key))
    return [name for name, ok in fields if not ok] if len(fields) > MOST_UNDOCUMENTED else []


def test_each_field_of_a_large_dataclass_has_its_line():
    missing = {
        f"{where(path, node)} {node.name}": names
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if is_dataclass(node) and node.name not in NAMED_AS_WHAT_THEY_MAKE
        if (names := undocumented(node))
    }
    assert missing == {}


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: path.name)
def test_the_fields_english(path):
    text = path.read_text(encoding="utf-8")
    assert [match[0] for match in PRIVATE_ENGLISH.finditer(text)] == []
