"""Imports the file or the module that holds a user's factory."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_holder(name: str) -> ModuleType:
    """Imports "package.module", also from the current folder, or "path/file.py", of a factory's name what stands before
    the colon. Raises what importing it raises."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return _import_file(Path(name).resolve()) if is_file(name) else importlib.import_module(name)


def is_file(name: str) -> bool:
    """Whether the part of a factory's name before the colon is a file's path."""
    return name.endswith(".py") or "/" in name


@functools.cache
def _import_file(path: Path) -> ModuleType:
    """Imports a file: of a package by the package's name, so that its relative imports work; any other as Python runs
    it, its folder on the path, under a name that no module has (a test.py is not the standard library's `test`)."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if root != path.parent:
        return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    found = None if "." in path.stem else importlib.util.find_spec(path.stem)
    if found is not None and found.origin == str(path):
        return importlib.import_module(path.stem)
    name = f"_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # a file without .py
        raise ImportError(f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
