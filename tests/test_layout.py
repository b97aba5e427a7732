"""README.md's tree names every folder, and how-it-works.md names real functions."""

import ast
import re
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "longshore"
LIFE = "docs/how-it-works.md"

HEADING = re.compile(r"#{1,6} ")
CODE_NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")
TREE_LINE = re.compile(r"(\S+) {2,}\S")


def section(title, page="README.md"):
    """The lines of a page between the heading `title` and the next heading."""
    if not (ROOT / page).is_file():
        pytest.fail(f"{page} is missing")
    inside, fenced, lines = False, False, []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if HEADING.match(line) and not fenced:
            if inside:
                return lines
            inside = HEADING.sub("", line).strip().lower() == title.lower()
        elif inside:
            lines.append(line)
    if not inside:
        pytest.fail(f"{page} has no heading '{title}'")
    return lines


def life_rows():
    """The cells of each row below the header of the table "Life of a sequence"."""
    rows = [
        line.strip().strip("|").split("|")
        for line in section("Life of a sequence", LIFE)
        if line.lstrip().startswith("|")
    ]
    if len(rows) < 3:
        pytest.fail(f"{LIFE}, 'Life of a sequence': no table | step | file:function |")
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
    """Top-level functions and classes of a file; methods and attributes as Class.name."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for item in node.body for name in bound_names(item)}
    return names


def bound_names(node):
    """The name that a method or an attribute in the body of a class has."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_life_of_a_sequence_names_real_functions():
    for row in life_rows():
        named = CODE_NAME.findall(row[1]) if len(row) > 1 else []
        assert named, f"no `file.py:function` in the second cell of {row}"
        for file, name in named:
            path = PACKAGE / file
            assert path.is_file(), f"{file}, named in {LIFE}, does not exist in src/longshore"
            assert name in defined_names(path), f"{file} defines no {name}, named in {LIFE}"


def questions():
    """The text of each answer below "Three questions" in how-it-works.md, by its question."""
    page = (ROOT / LIFE).read_text(encoding="utf-8")
    part = page.partition("\n## Three questions")[2].partition("\n## ")[0]
    answers = [text.partition("\n") for text in part.split("\n### ")[1:]]
    return [pytest.param(text, id=title) for title, _, text in answers]


@pytest.mark.parametrize("answer", questions())
def test_a_question_is_answered_within_three_files(answer):
    """Its references are real, and lead to three files at most."""
    named = CODE_NAME.findall(answer)
    assert named or "<!-- files: " in answer, "no `file.py:function` in the answer"
    assert len({file for file, _ in named}) <= 3
    for file, name in named:
        assert name in defined_names(PACKAGE / file), f"{file} has no {name}, named in {LIFE}"


def test_three_questions_are_asked():
    assert len(questions()) == 3


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200, "README.md is the door; what explains belongs into docs/"


def test_tree_names_only_what_exists():
    paths = tree_paths()
    assert not [p for p in paths if not (ROOT / p).exists()], "in the tree, not on disk"
    assert len(paths) == len(set(paths)), "a path stands twice in the tree"


def test_tree_names_every_folder():
    folders = {p.parent.relative_to(ROOT).as_posix() + "/" for p in PACKAGE.glob("*/__init__.py")}
    assert folders - set(tree_paths()) == set(), "folders missing from the tree in README.md"
