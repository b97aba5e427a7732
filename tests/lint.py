"""Rules of words and layout that ruff does not know; `make lint` prints every offence and fails.

    src/longshore/plan/cost.py:12: `made` says nothing: name the thing

A rule takes a tree (`Tree`: the sources, parsed once, and the pages) and yields offences. The rules
of words: a class name exists once, names say something, each field of a large dataclass has its
line, the field's English, errors are never rewritten. Those of layout: README.md's tree names every
folder and stays short, how-it-works.md answers three questions within three files each. Those of
pages: keys, commands, options, make targets, files, functions and public names exist.
"""

import argparse
import ast
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "longshore"
LIFE = "docs/how-it-works.md"

VAGUE = {"made", "found", "told", "held", "seen", "got", "strange"}
PRIVATE_ENGLISH = re.compile(
    r"\b(go(es)? on (with|in|after|from|where|by)|gone on with|that there are not|dear(er|est)?)\b"
)
MOST_UNDOCUMENTED = 4
NAMED_AS_WHAT_THEY_MAKE = {"Dense", "Patterned", "RunConfig"}
"""Fields of presets are those of the configs they make, those of RunConfig the sections."""
CHANGES = {"replace", "removeprefix", "removesuffix", "sub", "subn", "split", "partition"}
README_LINES = 200

BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
TREE_LINE = re.compile(r"(\S+) {2,}\S")
CODE_NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")
NAMED_PATH = re.compile(r"((?:[\w.-]+/)+[\w.-]+\.(?:md|py|sh|toml)|CONTRIBUTING\.md)(?::([\w.]+))?")
IMPORT = re.compile(r"^[ \t]*(?:from longshore\b[^\n(]*(?:\([^)]*\))?|import longshore\b.*)", re.M)
FILE_ENDINGS = ("csv", "html", "json", "jsonl", "md", "py", "svg", "toml", "yaml")
MADE_BY_RUNS = ("runs/", "prepared/")


class Offence(NamedTuple):
    path: Path
    line: int
    text: str


class Block(NamedTuple):
    mark: str
    language: str
    text: str


class Tree:
    """The sources and pages of a repository."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.package = root / "src" / "longshore"
        self.docs = sorted((root / "docs").glob("*.md"))
        self.pages = sorted([*root.glob("*.md"), *self.docs, *root.glob("recipes/*.md")])

    @cached_property
    def sources(self) -> dict[Path, ast.Module]:
        paths = sorted(self.package.rglob("*.py"))
        return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}

    @cached_property
    def nodes(self) -> list[tuple[Path, ast.AST]]:
        return [(path, node) for path, module in self.sources.items() for node in ast.walk(module)]

    @property
    def texts(self) -> list[Path]:
        """The pages that users read."""
        return [p for p in self.pages if p.parent != self.root or p.name == "README.md"]


def class_names(tree: Tree) -> Iterator[Offence]:
    places = defaultdict(list)
    for path, module in tree.sources.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append((path, node.lineno))
    for name, at in places.items():
        first = at[0][0].relative_to(tree.root)
        yield from (Offence(*where, f"a class {name} exists in {first} too") for where in at[1:])


def vague_names(tree: Tree) -> Iterator[Offence]:
    for path, node in tree.nodes:
        if (name := _bound_name(node)) in VAGUE:
            yield Offence(path, node.lineno, f"`{name}` says nothing: name the thing")


def _bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    return None


def undocumented_fields(tree: Tree) -> Iterator[Offence]:
    for path, node in tree.nodes:
        if _is_dataclass(node) and node.name not in NAMED_AS_WHAT_THEY_MAKE:
            for field in _undocumented(node):
                text = f"{node.name}.{field.target.id} has no line of documentation under it"
                yield Offence(path, field.lineno, text)


def _is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def _undocumented(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """Fields of a dataclass that have no string below them, and are no keys of a recipe."""
    fields = []
    for item, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or "ClassVar" in ast.unparse(item.annotation):
            continue
        is_documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        is_key = item.value is not None and re.search(r"\bkey\(|about", ast.unparse(item.value))
        fields.append((item, is_documented or is_key))
    return [item for item, ok in fields if not ok] if len(fields) > MOST_UNDOCUMENTED else []


def private_english(tree: Tree) -> Iterator[Offence]:
    for path in [*tree.sources, *tree.pages]:
        for line, text in _lines(path):
            for match in PRIVATE_ENGLISH.finditer(text):
                yield Offence(path, line, f"“{match[0]}” is not the field's English")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)


def rewritten_errors(tree: Tree) -> Iterator[Offence]:
    """The text of an error is changed: methods of CHANGES called on or with str(error)."""
    for path, handler in tree.nodes:
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for call in ast.walk(handler):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                texts = [ast.unparse(text) for text in (call.func.value, *call.args)]
                if call.func.attr in CHANGES and f"str({handler.name})" in texts:
                    yield Offence(path, call.lineno, "rewrites the text of an error")


def readme_tree(tree: Tree) -> Iterator[Offence]:
    """The tree has a line for every folder, path and role, and none for what is not there."""
    readme = tree.root / "README.md"
    lines = readme.read_text(encoding="utf-8").splitlines()
    if len(lines) > README_LINES:
        yield Offence(readme, README_LINES + 1, "README.md is the door; explain in docs/")
    start = lines.index("## The tree") + 3 if "## The tree" in lines else len(lines)
    named = set()
    for number, line in enumerate(takewhile(lambda line: line != "```", lines[start:]), start + 1):
        match = TREE_LINE.match(line)
        if match is None:
            yield Offence(readme, number, "a line of the tree is: path, two spaces, role")
        elif not (tree.root / match[1]).exists() or match[1] in named:
            yield Offence(readme, number, f"{match[1]} does not exist, or stands here twice")
        else:
            named.add(match[1])
    folders = {f"src/longshore/{path.parent.name}/" for path in tree.package.glob("*/__init__.py")}
    for folder in sorted(folders - named):
        yield Offence(readme, start, f"the tree has no line for {folder}")


def three_questions(tree: Tree) -> Iterator[Offence]:
    """Each of three answers leads to three files at most."""
    path = tree.root / LIFE
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, _, part = page.partition("\n## Three questions")
    answers = part.partition("\n## ")[0].split("\n### ")[1:]
    line = before.count("\n") + 2
    if len(answers) != 3:
        yield Offence(path, line, f"{len(answers)} questions instead of three")
    for answer in answers:
        files = {file for file, _ in CODE_NAME.findall(answer)}
        if not 1 <= len(files) <= 3:
            title = answer.partition("\n")[0]
            yield Offence(path, line, f"“{title}” names {len(files)} files, not one to three")


def defined_names(path: Path) -> set[str]:
    """Top-level functions and classes of a file; methods and attributes as Class.name."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for item in node.body for name in _members(item)}
    return names


def _members(node: ast.stmt) -> list[str]:
    """The name that a method or an attribute in the body of a class has."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def blocks_of(page: Path, *languages: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = [Block(*(group or "" for group in match)) for match in BLOCK.findall(text)]
    return [block for block in blocks if not languages or block.language in languages]


def inline_of(page: Path) -> list[str]:
    """What stands between backticks, blocks aside."""
    return INLINE.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))


def commands_of(page: Path) -> list[list[str]]:
    """Every command line of a page as words, inline ones included; refused ones are not."""
    lines = []
    for block in blocks_of(page, "sh"):
        if block.mark != "refused":
            lines += block.text.replace("\\\n", " ").splitlines()
    lines += [text for text in inline_of(page) if text.startswith(("longshore ", "make "))]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def _at(page: Path, shown: str, text: str) -> Offence:
    """An offence in the first line of a page that has what is shown."""
    lines = [number for number, line in _lines(page) if shown in line]
    return Offence(page, lines[0] if lines else 1, text)


def unknown_keys(tree: Tree) -> Iterator[Offence]:
    from longshore.config.other_systems import all_keys
    from longshore.config.schema import SECTIONS

    key = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.(\w+)(?![\w/])")
    for page in tree.texts:
        others = _of_other_systems(page)
        shown = [text for text in inline_of(page) if text not in others]
        shown += [block.text for block in blocks_of(page, "sh", "toml") if block.mark != "refused"]
        for section, name in (match for text in shown for match in key.findall(text)):
            if f"{section}.{name}" not in all_keys() and name not in FILE_ENDINGS:
                yield _at(page, f"{section}.{name}", f"there is no key {section}.{name}")


def _of_other_systems(page: Path) -> set[str]:
    """The first cells of the tables of coming-from.md, where other systems' words stand."""
    if page.stem != "coming-from":
        return set()
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return {text for row in rows for text in INLINE.findall(row.split("|")[1])}


def unknown_commands(tree: Tree) -> Iterator[Offence]:
    """Commands, their options, the words of `longshore train`, and targets of make."""
    parsers = _parsers()
    makefile = (tree.root / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    for page in tree.texts:
        for words in commands_of(page):
            if words[0] == "make" and words[1] not in targets:
                yield _at(page, f"make {words[1]}", f"make has no target {words[1]}")
            for shown, problem in _problems(_words_of_ours(words), parsers):
                yield _at(page, shown, problem)


def _parsers() -> dict[str, Any]:
    """The parser of each command."""
    from longshore.cli import main as cli

    commands = argparse.ArgumentParser().add_subparsers()
    for register in cli.COMMANDS:
        register(commands)
    return commands.choices


def _words_of_ours(words: list[str]) -> list[str]:
    """The words behind `longshore`, up to a redirection; none for other programs."""
    if "longshore.cli.main" in words:
        words = words[words.index("longshore.cli.main") :]
    elif words[0] != "longshore":
        return []
    return list(takewhile(lambda word: word not in (">", "|"), words[1:]))


def _problems(words: list[str], parsers: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Words that a command does not take, and why not."""
    from longshore.config.load import load_config

    if not words or words[0].startswith("-"):
        return
    command, *rest = words
    if command not in parsers:
        yield f"longshore {command}", f"there is no command {command}"
        return
    for word in rest:
        if word.startswith("--"):
            if word.split("=")[0] not in parsers[command]._option_string_actions:
                yield word, f"{command} has no {word}"
        elif command == "train" and re.match(r"\w+\.\w+=", word):
            try:
                load_config(None, [word])
            except ValueError as error:
                yield word, str(error)


def missing_files(tree: Tree) -> Iterator[Offence]:
    """Files and functions that pages name."""
    for page in tree.texts:
        shown = [*inline_of(page), *(word for words in commands_of(page) for word in words)]
        for path, name in (match for text in shown for match in NAMED_PATH.findall(text)):
            if path.startswith(MADE_BY_RUNS):
                continue
            bases = (tree.root, tree.package, page.parent)
            files = [base / path for base in bases if (base / path).is_file()]
            if not files:
                yield _at(page, path, f"there is no file {path}")
            elif name and name not in defined_names(files[0]):
                yield _at(page, f"{path}:{name}", f"{path} has no {name}")


def private_imports(tree: Tree) -> Iterator[Offence]:
    """Pages and examples are what others copy; a module may move at any time."""
    import longshore

    public = {f"longshore.{name}" for name in longshore.__all__}
    pages = [*tree.docs, tree.root / "README.md", *sorted((tree.root / "examples").glob("*.py"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in IMPORT.finditer(text):
            for name in sorted(_imported(match[0]) - public - {"longshore"}):
                line = text.count("\n", 0, match.start()) + 1
                yield Offence(page, line, f"{name} is not public")


def _imported(line: str) -> set[str]:
    (node,) = ast.parse(line.strip()).body
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    return {f"{node.module}.{alias.name}" for alias in node.names}


RULES = (
    class_names,
    vague_names,
    undocumented_fields,
    private_english,
    rewritten_errors,
    readme_tree,
    three_questions,
    unknown_keys,
    unknown_commands,
    missing_files,
    private_imports,
)


def offences(tree: Tree) -> list[str]:
    """Every offence against every rule, as file:line: what is wrong."""
    every = sorted({offence for rule in RULES for offence in rule(tree)})
    return [f"{path.relative_to(tree.root)}:{line}: {text}" for path, line, text in every]


if __name__ == "__main__":
    lines = offences(Tree())
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.exit(bool(lines))
