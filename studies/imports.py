"""Finds which module imports which, from the source: includes imports inside functions and for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("kernels", "microbench", "roofline", "studies")
# The package and its command: they stand above all rooms.
FACES = {"flopcast", "flopcast.__main__"}


@dataclass(frozen=True)
class Import:
    """One imported name, as dotted as the source has it; `lazy` when inside a function, `typing` when only for type
    checkers."""

    name: str
    lazy: bool
    typing: bool
    line: int


@cache
def imports_of(source: str) -> tuple[Import, ...]:
    """All imports of a module. There are no relative ones (ruff, TID). Kept: whoever follows chains of imports comes to
    each module many times, and the tests came 200,000 times."""

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(alias.name, lazy, typing, node.lineno)
            case ast.ImportFrom():
                assert node.level == 0, f"line {node.lineno}: relative import"
                for alias in node.names:
                    yield Import(f"{node.module}.{alias.name}", lazy, typing, node.lineno)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for child in node.body:
                    yield from walk(child, lazy, True)
                for child in node.orelse:
                    yield from walk(child, lazy, typing)
            case _:
                lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for inner in ast.iter_child_nodes(node):
                    yield from walk(inner, lazy, typing)

    return tuple(walk(ast.parse(source), lazy=False, typing=False))


def sources() -> dict[str, str]:
    """Module name -> source, for every module of this repository."""
    files = [*(ROOT / "src" / "flopcast").glob("*.py"), *(f for p in PARTS for f in (ROOT / p).rglob("*.py"))]
    found = {}
    for file in files:
        base = ROOT / "src" / "flopcast" if file.is_relative_to(ROOT / "src") else ROOT
        parts = file.relative_to(base).with_suffix("").parts
        if parts[0] != "studies":
            parts = ("flopcast", *parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text(encoding="utf-8")
    return found


def module_of(name: str, known: Mapping[str, str]) -> str:
    """The module that an imported name is or belongs to: `flopcast.errors.DataError` -> `flopcast.errors`.

    A name of this repository that is not a module is returned as it is (`flopcast.kernels` is a namespace folder).
    """
    if name.partition(".")[0] not in ("flopcast", "studies"):
        return name.partition(".")[0]
    candidates = (name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1))
    return next((c for c in candidates if c in known and c != "flopcast"), name)


def arrows(known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Pairs (importer, imported) of this repository's modules, given by name with their source; every import counts."""
    for module, source in known.items():
        if module in FACES:
            continue
        for item in imports_of(source):
            target = module_of(item.name, known)
            if target in known and target not in (module, "flopcast"):
                yield module, target
