"""Collects the code and the tables that decide what an operator compiles and launches, read as syntax, not imported.

`parts` begins at the registered operators (`torch.library.custom_op`, `operators.operator`), follows the names they use
from definition to definition through the modules of a folder, and includes the JSON tables whose file name pattern
("matmul_*.json") occurs in one of them. The texts that it returns do not depend on

- files' names, places and order, imports and their aliases;
- layout, comments, docstrings, and annotations other than those that Triton reads;
- exceptions that are raised, and code that no operator uses: torch's counterparts, references, registrations.

Names are resolved as Python does it. A module that is passed around as a value counts in full, because which of its
names are used cannot be determined.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

_PACKAGE = "flopcast.kernels."
# Modules that define what is computed, or by which call of the host, and not which kernels run: they are not followed.
_DESCRIPTIONS = ("shapes", "references", "launching", "operators")
_LOADER = "load_triton"  # load_triton("rope") is the module triton_rope
# The annotations that Triton reads: constexpr, const and scalar types.
_READ_BY_TRITON = re.compile(r"const(?:expr)?|\*?k?(?:[iu]|u?int|fp|bf|b?float)\d+")
_SILENT = ("ctx", "kind", "type_comment")  # fields of a node that follow from others, or have no effect at run time
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Form = str | list["Form | None"]  # a syntax node in a form that JSON can hold: the same under every version of Python


def parts(folder: Path, is_meant: Callable[[str], bool]) -> list[str]:
    """The definitions and tables used by the operators `flopcast::<name>` whose name `is_meant`, as sorted texts."""
    modules = _modules(folder)
    reached: set[tuple[str, str]] = set()
    tables: set[str] = set()
    readers = {name: _Reader(name, modules, reached, tables) for name in modules}
    found = {
        json.dumps(readers[name].function(function))
        for name, module in modules.items()
        for operator, function in module.operators.items()
        if is_meant(operator)
    }
    done: set[tuple[str, str]] = set()
    while todo := reached - done:
        done |= todo
        found |= {json.dumps(readers[m].form(s)) for m, name in todo for s in modules[m].definitions[name]}
    files = {file for pattern in tables for file in folder.rglob(pattern)}
    return sorted(found | {_table(file.read_text(encoding="utf-8")) for file in files})


def _table(text: str) -> str:
    """A table's text in a form independent of its layout, the order of its keys and how its numbers are written (1,
    1.0, 1e0)."""

    def number(digits: str) -> float:
        value = float(digits)
        return int(value) if value.is_integer() else value

    return json.dumps(json.loads(text, parse_float=number), sort_keys=True)


# --- which definition a name refers to


@dataclass(frozen=True)
class _Module:
    definitions: Mapping[
        str, list[ast.stmt]
    ]  # by the names that a statement binds or changes; without those that hold the places of files
    imports: Mapping[str, str]  # what a name imported anywhere in the module stands for, dotted
    operators: Mapping[str, ast.FunctionDef]


@lru_cache
def _modules(folder: Path) -> dict[str, _Module]:
    """All modules below a folder, by dotted name."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): _module(path.read_text(encoding="utf-8"))
        for path in folder.rglob("*.py")
    }


def _module(source: str) -> _Module:
    tree = ast.parse(source)
    definitions: dict[str, list[ast.stmt]] = defaultdict(list)
    operators: dict[str, ast.FunctionDef] = {}
    imports: dict[str, str] = {}
    for statement in tree.body:
        nodes = list(ast.walk(statement))
        if not any(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes):
            for name in _bound(statement) | _changed(statement):
                definitions[name].append(statement)
        if isinstance(statement, ast.FunctionDef):
            operators |= dict.fromkeys(_registered_as(statement), statement)
        for node in nodes:
            if isinstance(node, ast.Import):
                imports |= dict(_imported(alias) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imports |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return _Module(dict(definitions), imports, operators)


def _imported(alias: ast.alias) -> tuple[str, str]:
    """The name that `import a.b` or `import a.b as c` binds, and the dotted path that it is bound to."""
    root = alias.name.partition(".")[0]
    return (alias.asname, alias.name) if alias.asname else (root, root)


def _registered_as(function: ast.FunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        match decorator:
            case ast.Call(
                func=ast.Attribute(attr="custom_op") | ast.Name(id="operator"), args=[ast.Constant(value=str(name)), *_]
            ):
                yield name.partition("::")[2]


def _bound(node: ast.AST) -> set[str]:
    """The names that a node binds in its enclosing scope."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Name(id=name, ctx=ast.Store()):
            return {name}
    return set() if isinstance(node, _SCOPES) else _bound_within(node)


def _bound_within(node: ast.AST) -> set[str]:
    return {name for child in ast.iter_child_nodes(node) for name in _bound(child)}


def _changed(statement: ast.stmt) -> set[str]:
    """The names whose values a module-level statement changes: TABLE["a"] = 1, TABLE.update(...)."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return set()
    changed = [
        node.func if isinstance(node, ast.Call) else node.value
        for node in ast.walk(statement)
        if (isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Call) and isinstance(statement, ast.Expr))
    ]
    return {node.id for value in changed for node in ast.walk(value) if isinstance(node, ast.Name)}


# --- a definition as a form


@dataclass
class _Reader:
    """Reads the syntax of one module; the definitions that it uses are added to `reached` (module, name), the tables to
    `tables` (file name patterns)."""

    name: str
    modules: Mapping[str, _Module]
    reached: set[tuple[str, str]]
    tables: set[str]
    scopes: list[set[str]] = field(default_factory=list)  # the names bound in the scopes being read

    def form(self, node: Any) -> Form | None:
        """The form of a node; None for what does not count towards the fingerprint."""
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
                return None
            case ast.Raise():
                return "raise"
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                decorators = [x for x in node.decorator_list if not self.is_of_host(x)]
                return [node.name, self.form(decorators), self.function(node)]
            case ast.Call(func=ast.Name() as called, args=[kernel, grid, *rest]) if self.is_of_host(called):
                by_triton = ast.Subscript(kernel, grid, ast.Load())
                return self.form(ast.Call(by_triton, rest, node.keywords))
            case ast.Lambda():
                return self.function(node)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                with self.scope(_bound_within(node)):
                    return self.fields(node)
            case ast.AnnAssign(value=None) if self.scopes:
                return None  # of a class it is a field
            case ast.AnnAssign(target=target, value=value, annotation=annotation):
                return ["=", self.form([target]), self.form(value), self.annotation(annotation)]
            case ast.Assign(targets=targets, value=value):
                return ["=", self.form(targets), self.form(value), None]
            case ast.arg():
                return [node.arg, self.annotation(node.annotation)]
            case ast.Constant(value=str(text)) if text.endswith(".json"):
                self.tables.add(text)
                return "table"
            case ast.Name() | ast.Attribute() | ast.Call() if path := self.path(node):
                return ["name", self.follow(path)]
            case ast.AST():
                return self.fields(node)
            case list():
                return [form for form in map(self.form, node) if form is not None]
            case _:
                return repr(node)

    def fields(self, node: ast.AST) -> Form:
        """The form of a node by its fields, without empty ones, in which Python's versions differ."""
        filled = {
            name: value
            for name, value in ast.iter_fields(node)
            if name not in _SILENT and value is not None and value != []
        }
        return [type(node).__name__, *([name, self.form(value)] for name, value in filled.items())]

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Form:
        """The form of a function: its arguments, whose defaults belong to the enclosing scope, and its body."""
        arguments = self.form(node.args)
        names = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        body = node.body if isinstance(node.body, list) else [node.body]
        with self.scope(names.union(*map(_bound, body))):
            return [arguments, self.form(body)]

    @contextmanager
    def scope(self, names: set[str]) -> Iterator[None]:
        self.scopes.append(names)
        yield
        self.scopes.pop()

    def annotation(self, node: ast.expr | None) -> Form | None:
        """The form of an annotation that Triton reads; None for any other."""
        read = None if node is None else _READ_BY_TRITON.search(ast.unparse(node))
        return read and read[0]

    def path(self, node: ast.AST) -> str | None:
        """The dotted path that a name or an attribute stands for; None where it does not belong to a module."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if not any(name in scope for scope in self.scopes):
                mine = self.modules[self.name]
                return f"{_PACKAGE}{self.name}.{name}" if name in mine.definitions else mine.imports.get(name)
            case ast.Attribute(value=value, attr=name):
                path = self.path(value)
                return path and f"{path}.{name}"
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                path = self.path(function)
                return f"{_PACKAGE}triton_{name}" if path and path.endswith(f".{_LOADER}") else None
        return None

    def is_of_host(self, node: ast.AST) -> bool:
        """Whether a name is of the module by which the host launches: `launch(kernel, grid, ...)` there is
        `kernel[grid](...)`, and its decorators change nothing on a GPU."""
        return (self.path(node) or "").startswith(f"{_PACKAGE}launching.")

    def follow(self, path: str) -> str:
        """Returns the path without the modules of the folder that it passes through; the definition at its end is added
        to `reached`."""
        names = path.removeprefix(_PACKAGE).split(".")
        places = (".".join(names[:cut]) for cut in range(len(names), 0, -1))
        module = next((place for place in places if place in self.modules), None)
        if module is None or not path.startswith(_PACKAGE):
            return path
        there, rest = self.modules[module], names[module.count(".") + 1 :]
        if rest and rest[0] in there.imports:
            return self.follow(".".join([there.imports[rest[0]], *rest[1:]]))
        if module not in _DESCRIPTIONS:
            self.reached |= {(module, name) for name in there.definitions if name in rest[:1] or not rest}
        return ".".join(rest)
