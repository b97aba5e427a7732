"""The size and the structure of the source: how many rooms a reader has to walk through.

    python bench/rooms.py            a table with limits, each ok or over
    python bench/rooms.py --list     also the modules behind the figures

In: src/longshore, read as text, and a run of tiny-qwen3 on one rank. Out: one line for each figure;
the exit code is 1 if one is over its limit. How each is counted:

- A module is a .py file, __init__.py included; its lines are all its lines. The advisor is the
  package longshore.advisor, and a class is a `class` statement, nested ones included.
- A module with a single importer is imported by exactly one other module of the package, wherever
  in the file the import stands: in a function too, and under TYPE_CHECKING. `from package import
  module` imports the module, not the package. Not counted, and not importers: __init__.py and
  __main__.py. Modules that are loaded by a name in a string alone, as kernels are, have a line of
  their own. Not counted: entry points, which are the modules that pyproject.toml names as
  scripts, that have an `if __name__ == "__main__"`, or that define a command (a function
  register_NAME in cli/NAME.py). Modules below 80 lines leave out the same ones.
- A function's length is from `def` to its last line, without decorators; nested ones count twice.
- What `train` imports: the modules of the package in sys.modules after a run of one step, once by
  the command and once by longshore.Trainer.
- A module is passed when a function of its runs, in any thread: a module's or a class's body is
  none. Start and one step: from before `Trainer(…)` to after its first step(), imports included.
  A steady step: from after the second step to after the third, with what the loader thread does
  meanwhile. Methods that dataclasses generate are in no module.
- The configuration is read where a field of RunConfig or of one of its sections is accessed, or
  getattr, fields or asdict take one; see config_reads.py. Modules of config/ are left out.
"""

import argparse
import ast
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Self

from config_reads import config_readers

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "longshore"
SOURCE = ROOT / "src" / PACKAGE
ADVISOR = f"{PACKAGE}.advisor"
SHORT = 80
RECIPE = ROOT / "recipes" / "tiny-qwen3-cpu.toml"
BY_COMMAND = "modules that `longshore train` imports"
# Of the function that they stand in, or of a module's body.
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
# The recipe is one of 4 ranks: all that a lane has must fit on one.
RUN = (
    *("parallel.ranks=1", "plan.capacity=2048", "data.batch=4", "data.count=64"),
    *("output.folder=run", "output.display=none", "train.warmup=0"),
)
SETTLE_S = 1.0  # for the loader thread to have prepared all that it may ahead
OTHERS = {  # measured alike: modules, lines, functions' median, p90 and max, modules train imports
    "torchtitan, core": (175, 55_761, 14, 57, 353, "93"),
    "TRL": (153, 62_224, 19, 86, 894, "35, and transformers"),
    "nanochat": (14, 3_414, 12, 47, 100, "12"),
    "Megatron-LM": (642, 250_892, 15, 70, 1_885, "452"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    value: int
    limit: int | None = None
    members: Seq[str] = ()
    """What is counted, for --list."""

    def __str__(self) -> str:
        limit = ""
        if self.limit is not None:
            limit = f"{self.limit:>8,}  {'over' if self.is_over else 'ok'}"
        return f"{self.name:<52}{self.value:>8,}{limit}"

    @property
    def is_over(self) -> bool:
        return self.limit is not None and self.value > self.limit


class Tree:
    """The modules of the package as syntax trees, by their dotted names."""

    def __init__(self, source: Path) -> None:
        self.text = {_dotted(file, source): file.read_text() for file in source.rglob("*.py")}
        self.trees = {name: ast.parse(text) for name, text in sorted(self.text.items())}
        self.packages = {_dotted(file, source) for file in source.rglob("__init__.py")}

    def lines(self, name: str) -> int:
        return len(self.text[name].splitlines())

    def of(self, *kinds: type[ast.AST], outside: str = "") -> Iterator[ast.AST]:
        """All nodes of some kinds, but not those of a package."""
        for name, tree in self.trees.items():
            if not (outside and _is_in(name, outside)):
                yield from (node for node in ast.walk(tree) if isinstance(node, kinds))

    @cached_property
    def entries(self) -> set[str]:
        """Modules that something else than an import reaches."""
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        named = {script.partition(":")[0] for script in scripts.values()}
        return self.packages | named | {name for name in self.trees if self._is_entry(name)}

    def _is_entry(self, name: str) -> bool:
        package, _, last = name.rpartition(".")
        if last == "__main__":
            return True
        for node in self.trees[name].body:
            if isinstance(node, ast.If) and "__name__ ==" in ast.unparse(node.test):
                return True
            if isinstance(node, ast.FunctionDef) and node.name == f"register_{last}":
                return package == f"{PACKAGE}.cli"
        return False

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        importers: dict[str, set[str]] = defaultdict(set)
        for name, tree in self.trees.items():
            if name in self.packages or name.endswith(".__main__"):
                continue
            for imported in self._imported(tree):
                if imported != name:
                    importers[imported].add(name)
        return importers

    def _imported(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.trees)
            elif isinstance(node, ast.ImportFrom) and node.module in self.trees:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in self.trees else node.module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the modules behind the figures")
    parser.add_argument("--probe", choices=[*PROBES], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        print(json.dumps(PROBES[args.probe]()))
        return 0
    tree = Tree(SOURCE)
    with ThreadPoolExecutor() as pool:
        probes = pool.map(measured, PROBES)
        figures = [*static_figures(tree), *run_figures(dict(zip(PROBES, probes, strict=True)))]
    print(f"{'':<52}{'now':>8}{'limit':>8}")
    for figure in figures:
        print(figure)
        if args.list:
            print("".join(f"    {member}\n" for member in figure.members), end="")
    print_lengths(tree, next(f.value for f in figures if f.name == BY_COMMAND))
    return any(figure.is_over for figure in figures)


def static_figures(tree: Tree) -> list[Figure]:
    """What the text says."""
    core = [name for name in tree.trees if not _is_in(name, ADVISOR)]
    inner = [name for name in core if name not in tree.entries]
    single = [
        f"{name}  ({next(iter(tree.importers[name]))})"
        for name in inner
        if len(tree.importers[name]) == 1
    ]
    unnamed = [name for name in inner if not tree.importers[name]]
    short = [f"{name}  ({tree.lines(name)})" for name in inner if tree.lines(name) < SHORT]
    readers = config_readers(tree.trees, package=PACKAGE)
    reads = [f"{name}  ({count})" for name, count in readers.items()]
    return [
        Figure("modules", len(tree.trees)),
        Figure("modules outside advisor/", len(core), 215),
        Figure("lines", sum(map(tree.lines, tree.trees))),
        Figure("lines outside advisor/", sum(map(tree.lines, core)), 51_000),
        Figure("classes", _count(tree.of(ast.ClassDef))),
        Figure("classes outside advisor/", _count(tree.of(ast.ClassDef, outside=ADVISOR)), 430),
        Figure("modules outside advisor/ with a single importer", len(single), 35, single),
        Figure("modules outside advisor/ that no statement imports", len(unnamed), None, unnamed),
        Figure(f"modules outside advisor/ below {SHORT} lines", len(short), None, short),
        Figure("modules that read the checked configuration", len(reads), 15, reads),
    ]


def run_figures(probes: dict[str, dict[str, list[str]]]) -> list[Figure]:
    """What a run of tiny-qwen3 on one rank loads and passes."""
    command, trainer = probes["command"], probes["trainer"]
    first, steady = _modules(trainer["first"]), _modules(trainer["steady"])
    return [
        Figure(BY_COMMAND, len(command["imported"]), None, command["imported"]),
        Figure("modules that longshore.Trainer imports", len(trainer["imported"])),
        Figure("modules passed by start and one step", len(first), 85, first),
        Figure("functions passed by start and one step", len(trainer["first"])),
        Figure("modules passed by a steady step", len(steady), 45, steady),
        Figure("functions passed by a steady step", len(trainer["steady"])),
    ]


def print_lengths(tree: Tree, imported: int) -> None:
    """Longshore beside others."""
    lengths = [_length(node) for node in tree.of(ast.FunctionDef, ast.AsyncFunctionDef)]
    median, p90 = statistics.median_low(lengths), statistics.quantiles(lengths, n=10)[-1]
    lines = sum(map(tree.lines, tree.trees))
    ours = (len(tree.trees), lines, median, round(p90), max(lengths), str(imported))
    print(f"\n{'':<18}{'modules':>8}{'lines':>9}  functions: median / p90 / max   train imports")
    for name, row in {"Longshore": ours, **OTHERS}.items():
        modules, lines, *spread, imports = row
        shown = " / ".join(f"{length:,}" for length in spread)
        print(f"{name:<18}{modules:>8,}{lines:>9,}  {shown:<32}{imports}")


def measured(probe: str) -> dict[str, list[str]]:
    """What a probe prints, in a process of its own that imports this source."""
    words = [sys.executable, __file__, "--probe", probe]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    names: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return names


def probe_command() -> dict[str, list[str]]:
    from longshore.cli.main import main as command

    code = command(["train", str(RECIPE), *RUN, "train.steps=1"])
    assert code == 0, f"longshore train ended with {code}"
    return {"imported": _imported()}


def probe_trainer() -> dict[str, list[str]]:
    with Passed() as passed:
        from longshore import Trainer

        with Trainer(RECIPE, overrides=[*RUN, "train.steps=8"]) as trainer:
            trainer.step()
            first, imported = passed.taken(), _imported()
            trainer.step()
            time.sleep(SETTLE_S)
            passed.taken()
            trainer.step()
            time.sleep(SETTLE_S)
            steady = passed.taken()
    return {"first": first, "imported": imported, "steady": steady}


PROBES: dict[str, Callable[[], dict[str, list[str]]]] = {
    "command": probe_command,
    "trainer": probe_trainer,
}


class Passed:
    """Notes the functions of the package that run, in this thread and those that it starts."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        # The body of a module or a class is no function: its names are not optimized to slots.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
            self.functions.add((code.co_filename, code.co_qualname))

    def taken(self) -> list[str]:
        """As module:function, those since the last call."""
        functions, self.functions = self.functions, set()
        prefix = f"{SOURCE}{os.sep}"
        return sorted(
            f"{_dotted(Path(file), SOURCE)}:{name}"
            for file, name in functions
            if file.startswith(prefix) and not name.endswith(COMPREHENSIONS)
        )


def _imported() -> list[str]:
    return sorted(name for name in sys.modules if _is_in(name, PACKAGE))


def _modules(functions: Iterable[str]) -> list[str]:
    return sorted({function.partition(":")[0] for function in functions})


def _dotted(file: Path, source: Path) -> str:
    parts = [PACKAGE, *file.relative_to(source).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _length(node: ast.AST) -> int:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _count(nodes: Iterable[ast.AST]) -> int:
    return sum(1 for _ in nodes)


if __name__ == "__main__":
    raise SystemExit(main())
