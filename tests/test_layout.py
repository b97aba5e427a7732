"""README.md names real files and functions, and its tree names every folder."""

import ast
import re
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "longshore"

HEADING = re.compile(r"#{1,6} ")
CODE_NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")
TREE_LINE = re.compile(r"(\S+) {2,}\S")


def section(title):
    """The lines of README.md between the heading `title` and the next heading."""
    readme = ROOT / "README.md"
    if not readme.is_file():
        pytest.fail("README.md is missing")
    found, fenced, lines = False, False, []
    for line in readme.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if HEADING.match(line) and not fenced:
            if found:
                return lines
            found = HEADING.sub("", line).strip().lower() == title.lower()
        elif found:
            lines.append(line)
    if not found:
        pytest.fail(f"README.md has no heading '{title}'")
    return lines


def life_rows():
    """The cells of each row below the header of the table "Life of a sequence"."""
    rows = [
        line.strip().strip("|").split("|")
        for line in section("Life of a sequence")
        if line.lstrip().startswith("|")
    ]
    if len(rows) < 3:
        pytest.fail("README.md, 'Life of a sequence': no table | step | file:function |")
    return rows[2:]


def tree_paths():
    """The paths of the fenced block below "The tree": a path, two or more spaces, its role."""
    lines = section("The tree")
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines or not lines[0].startswith("```"):
        pytest.fail("README.md, 'The tree': no fenced block right after the heading")
    fenced = takewhile(lambda line: line.strip() != "```", lines[1:])
    block = [line for line in fenced if line.strip()]
    unreadable = [line for line in block if not TREE_LINE.match(line)]
    assert not unreadable, f"tree lines that are not 'path  role': {unreadable}"
    return [TREE_LINE.match(line)[1] for line in block]


def defined_names(path):
    """Top-level functions and classes of a file, and methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_life_of_a_sequence_names_real_functions():
    for row in life_rows():
        named = CODE_NAME.findall(row[1]) if len(row) > 1 else []
        assert named, f"no `file.py:function` in the second cell of {row}"
        for file, name in named:
            path = PACKAGE / file
            assert path.is_file(), f"{file}, named in README.md, does not exist in src/longshore"
            assert name in defined_names(path), f"{file} defines no {name}, named in README.md"


def test_tree_names_only_what_exists():
    paths = tree_paths()
    assert not [p for p in paths if not (ROOT / p).exists()], "in the tree, not on disk"
    assert len(paths) == len(set(paths)), "a path stands twice in the tree"


def test_tree_names_every_folder():
    folders = {p.parent.relative_to(ROOT).as_posix() + "/" for p in PACKAGE.glob("*/__init__.py")}
    assert folders - set(tree_paths()) == set(), "folders missing from the tree in README.md"
