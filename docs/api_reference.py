"""docs/api.md from the code: every public name with its signature and what its docstring says.

In: the names of longshore/__init__.py. Out: the page. Signatures are the text of the source, so
they are the same with every version of Python; `make_plan(lengths, *, lanes, …)` is found in
plan/planner.py and shown as it stands there. No torch is loaded.
"""

import ast
from pathlib import Path

import longshore

PAGE = Path(__file__).with_name("api.md")
PACKAGE = Path(longshore.__file__).parent
GROUPS = {
    "Training": "Trainer load_config RunConfig RunError",
    "Plans": (
        "make_plan check Plan Round Pack Sequence PlanSetting Stats CostProfile load_profile "
        "model_cost make_layout stage_costs Policy policy_named policy_names"
    ),
    "The data path": (
        "TokenizedSample Field samples_of lane_rows Tokenizer Rules SampleTokenizer MemorySource "
        "Store pack_lane lane_cuts cut_shards Shards pack_step unpack merge Piece "
        "send_back IndexedSteps StreamedSteps Step BatchSize Place Packing Loader"
    ),
    "What a model gets": "MicroBatch SeqContext PackContext CPGroup Counts whole_context",
    "Ranks and models": (
        "Topology make_topology CPGroups Decoder DecoderConfig init_decoder preset adapt "
        "parallelize Choices begin_round shift"
    ),
}
HEAD = """\
# Python API

Everything that `from longshore import …` offers, in one list; a test fails if a name or a signature
changes without this page. `import longshore` loads no torch; each name loads what it needs when it
is first used. What is not on this page may change at any time. [Python](python.md) shows the
Trainer, and `examples/` has programs around the parts.

<!-- written by docs/generate.py from the code -->
"""


def page() -> str:
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [entry(name) for name in names.split()]
    return "\n".join(parts)


def entry(name: str) -> str:
    """A name with its signature, its docstring and, of a class, what it has."""
    module = longshore._HOME[name]
    node = definition(module, name)
    text = [f"### {name}\n", f"`longshore.{module}`. {_doc(node)}\n"]
    if isinstance(node, ast.FunctionDef):
        text.append(f"```text\n{signature(node)}\n```\n")
    else:
        init = _method(node, "__init__")
        if init is not None:
            text.append(f"```text\n{signature(init, node.name)}\n```\n")
            if about := _doc(init):
                text.append(f"{about}\n")
        if rows := "".join(_members(node)):
            text.append(f"| has | |\n|---|---|\n{rows}")
    return "\n".join(text)


def definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"{path} defines no {name}")


def signature(node: ast.FunctionDef, name: str = "") -> str:
    """As the source has it, on one line or, where that is long, with a line for each argument."""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0].args
    first = [*arguments.posonlyargs, *arguments.args][:1]
    if first and first[0].arg in ("self", "cls"):
        (arguments.posonlyargs or arguments.args).pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    inner = ast.unparse(arguments)
    line = f"{name or node.name}({inner}){returns}"
    if len(line) <= 96:
        return line
    lines = ",\n".join(f"    {part}" for part in _split(inner))
    return f"{name or node.name}(\n{lines},\n){returns}"


def _split(arguments: str) -> list[str]:
    """The arguments between the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return next((item for item in methods if item.name == name), None)


def _members(node: ast.ClassDef) -> list[str]:
    """A row for each public field, property and method; of a field the string below it."""
    rows = []
    for item, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and not item.target.id.startswith("_"):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            about = " ".join(below.value.value.split()) if is_text else ""
            rows.append(_row(f"{item.target.id}: {ast.unparse(item.annotation)}", about))
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            if any(ast.unparse(each) == "property" for each in item.decorator_list):
                rows.append(_row(f"{item.name}: {ast.unparse(item.returns)}", _doc(item)))
            else:
                rows.append(_row(" ".join(signature(item).split()), _doc(item)))
    return rows


def _row(code: str, about: str) -> str:
    cells = [f"`{code}`", about]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _doc(node: ast.FunctionDef | ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split())
