"""Which modules read the checked configuration, by the annotations of the source.

In: the syntax trees of all modules by their dotted names. Out: for each module outside config/ how
often it reads a field of RunConfig or of one of its sections:

    def make(job: TrainingJob): return job.config.train.lr      2: .train of a RunConfig, .lr of it

mypy would know every type, but takes minutes. Here an expression has the type that is written where
its parts are defined: a parameter's or a field's annotation, what a function or property returns, a
class that is called, and what is assigned from these. A class name exists once in the package, so
names need no module. A parameter without a type, such as a lambda's, is not seen.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ROOT_CLASS = "RunConfig"
PASSED_ON = ("replace", "copy", "deepcopy")  # what they return has the type of what they take
READ_BY = ("getattr", "asdict", "astuple", "fields", "vars")
PROPERTIES = ("property", "cached_property")
Type = ast.expr | None
"""An annotation, whatever it says; None if it is not known."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Class:
    """What the attributes of a class are."""

    bases: list[str]
    fields: dict[str, Type] = field(default_factory=dict)
    methods: dict[str, Type] = field(default_factory=dict)
    """What each returns."""


def config_readers(trees: Mapping[str, ast.Module], *, package: str) -> dict[str, int]:
    """The modules outside config/ that read a field, and how often."""
    types = Types(trees)
    # Attributes that methods assign have types of their own, which a second round knows.
    for _ in range(2):
        readers = {name: Reader(types, name) for name in trees}
        for name, reader in readers.items():
            reader.visit(trees[name])
    counts = {name: reader.reads for name, reader in readers.items() if reader.reads}
    own = f"{package}.config"
    return {name: n for name, n in counts.items() if not f"{name}.".startswith(f"{own}.")}


class Types:
    """The classes and functions of all modules."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, dict[str, Type]] = defaultdict(dict)
        self.imported: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
        self.aliases: dict[str, ast.expr] = {}
        for name, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = _class(node)
                elif isinstance(node, Function):
                    self.functions[name].setdefault(node.name, node.returns)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        source = (node.module, alias.name)
                        self.imported[name][alias.asname or alias.name] = source
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.aliases[node.targets[0].id] = node.value
        sections = self.classes[ROOT_CLASS].fields.values()
        self.configs = {ROOT_CLASS, *(n for section in sections for n in self.names(section))}

    def names(self, kind: Type) -> Iterator[str]:
        """The classes of the package that something of this type may be."""
        match kind:
            case ast.Constant(value=str(text)):
                yield from self.names(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                yield from self.names(left)
                yield from self.names(right)
            case ast.Subscript(value=ast.Name("Optional" | "Annotated" | "Final"), slice=inner):
                yield from self.names(inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
            case ast.Subscript(value=outer):  # a class of the package with parameters
                yield from self.names(outer)
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in self.classes:
                yield name
            case ast.Name(id=name) if name in self.aliases and self.aliases[name] is not kind:
                if isinstance(self.aliases[name], ast.BinOp | ast.Name):
                    yield from self.names(self.aliases[name])

    def attribute(self, owner: Type, name: str) -> Type:
        """The type of a field or a property."""
        return next((found for c in self._lines(owner) if (found := c.fields.get(name))), None)

    def returned(self, owner: Type, name: str) -> Type:
        """What a method returns."""
        kind = next((found for c in self._lines(owner) if (found := c.methods.get(name))), None)
        return owner if isinstance(kind, ast.Name) and kind.id == "Self" else kind

    def _lines(self, owner: Type) -> Iterator[Class]:
        """The classes that an attribute is looked up in."""
        names = [*self.names(owner)]
        for name in names:  # which grows
            names += [base for base in self.classes[name].bases if base in self.classes]
            yield self.classes[name]

    def function(self, module: str, name: str) -> Type:
        """What a function returns that a module defines or imports, over any re-exports."""
        for _ in range(4):
            if name in self.functions[module]:
                return self.functions[module][name]
            module, name = self.imported[module].get(name, (module, name))
        return None


class Reader(ast.NodeVisitor):
    """Walks a module from top to bottom with the types of its names, and counts reads."""

    def __init__(self, types: Types, module: str) -> None:
        self.types, self.module = types, module
        self.reads = 0
        self.scope: dict[str, Type] = {}
        self.owner: ast.ClassDef | None = None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.owner = self.owner, node
        self.generic_visit(node)
        self.owner = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def _visit_function(self, node: Function) -> None:
        outer = self.scope
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.scope = {**outer, **{arg.arg: arg.annotation for arg in args}}
        if self.owner is not None and args and args[0].arg in ("self", "cls"):
            self.scope[args[0].arg] = ast.Name(self.owner.name)
        owner, self.owner = self.owner, None
        self.generic_visit(node)
        self.scope, self.owner = outer, owner

    def visit_Lambda(self, node: ast.Lambda) -> None:
        outer = self.scope
        self.scope = {**outer, **{arg.arg: None for arg in node.args.args}}
        self.generic_visit(node)
        self.scope = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind_type(node.target, node.annotation)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._bind(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind_type(node.target, _element(self.type_of(node.iter)))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._bind_type(item.optional_vars, self._entered(item.context_expr))
        for statement in node.body:
            self.visit(statement)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._visit_comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._visit_comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._visit_comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_comprehension(node)

    def _visit_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        outer, self.scope = self.scope, {**self.scope}
        for generator in node.generators:
            self._bind_type(generator.target, _element(self.type_of(generator.iter)))
        self.generic_visit(node)
        self.scope = outer

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owners = [*self._configs(node.value)]
        self.reads += any(node.attr in self.types.classes[name].fields for name in owners)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in READ_BY and node.args:
            self.reads += any(True for _ in self._configs(node.args[0]))

    def _configs(self, node: ast.expr) -> Iterator[str]:
        """The classes of the configuration that an expression may be of."""
        kinds = self.types.names(self.type_of(node))
        return (name for name in kinds if name in self.types.configs)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for inner, part in zip(target.elts, value.elts, strict=False):
                self._bind(inner, part)
        else:
            self._bind_type(target, self.type_of(value))

    def _bind_type(self, target: ast.expr, kind: Type) -> None:
        match target:
            case ast.Name(id=name):
                self.scope[name] = kind
            case ast.Tuple(elts=inner):
                for place, part in enumerate(inner):
                    self._bind_type(part, _part(kind, place))
            case ast.Attribute(value=ast.Name("self") as owner, attr=name) if kind is not None:
                for class_name in self.types.names(self.type_of(owner)):
                    self.types.classes[class_name].fields.setdefault(name, kind)

    def type_of(self, node: ast.expr) -> Type:
        """The annotation that holds for an expression, as far as it can be told."""
        match node:
            case ast.Name(id=name):
                return self.scope.get(name)
            case ast.Attribute(value=owner, attr=name):
                return self.types.attribute(self.type_of(owner), name)
            case ast.Call():
                return self._type_of_call(node)
            case ast.IfExp(body=body, orelse=other):
                return self.type_of(body) or self.type_of(other)
            case ast.BoolOp(values=values):
                return next((kind for v in values if (kind := self.type_of(v))), None)
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self.type_of(value)
            case ast.Subscript(value=value):
                return _element(self.type_of(value))
        return None

    def _type_of_call(self, node: ast.Call) -> Type:
        match node.func:
            case ast.Name("cls"):
                return self.scope.get("cls")
            case ast.Name(id=name) if name in self.types.classes:
                return node.func
            case ast.Name(id=name) if name in PASSED_ON and node.args:
                return self.type_of(node.args[0])
            case ast.Name("cast"):
                return node.args[0]
            case ast.Name("next" | "iter"):
                return _element(self.type_of(node.args[0]))
            case ast.Name(id=name):
                return self.types.function(self.module, name)
            case ast.Attribute(attr="enter_context") if node.args:
                return self._entered(node.args[0])
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in self.types.classes:
                return self.types.returned(ast.Name(name), method)
            case ast.Attribute(value=owner, attr=method):
                return self.types.returned(self.type_of(owner), method)
        return None

    def _entered(self, node: ast.expr) -> Type:
        """What `with` binds: what a @contextmanager yields, or the object itself."""
        kind = self.type_of(node)
        return kind if next(self.types.names(kind), None) else _element(kind)


def _class(node: ast.ClassDef) -> Class:
    described = Class([ast.unparse(base) for base in node.bases])
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            described.fields[statement.target.id] = statement.annotation
        elif isinstance(statement, Function):
            decorators = {ast.unparse(decorator) for decorator in statement.decorator_list}
            is_field = not decorators.isdisjoint(PROPERTIES)
            table = described.fields if is_field else described.methods
            table[statement.name] = statement.returns
    return described


def _element(kind: Type) -> Type:
    """What a list, tuple or iterator holds; the values of a mapping."""
    if not isinstance(kind, ast.Subscript):
        return None
    if not isinstance(kind.slice, ast.Tuple):
        return kind.slice
    typed = [part for part in kind.slice.elts if not isinstance(part, ast.Constant)]
    return typed[-1] if typed else None


def _part(kind: Type, place: int) -> Type:
    """The type of one place of a tuple."""
    if isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Tuple):
        parts = kind.slice.elts
        if place < len(parts) and not any(isinstance(part, ast.Constant) for part in parts):
            return parts[place]
    return _element(kind)
