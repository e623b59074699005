"""Stubs for modules that torch and transformers import and a trace does not use; they save a fifth of its time.

- `torch._dynamo`, the compiler: fake tensors read its configuration and optimizers ask it to leave functions alone. It
  imports inductor, onnx and more, 0.7 s. The stub keeps the real configuration and leaves functions alone.
- scipy.optimize, which transformers' losses of object detection match boxes with: 0.3 s.
- The map from installed packages to distributions, 0.1 s: transformers also asks by the package's own name.

For a process that traces and ends: modules imported with the stubs could not compile anything. A trace that needs
more fails, and is repeated without stubs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

_COMPILER, _SOURCES = "torch._dynamo", "torch._dynamo.source"


@contextmanager
def stubbed_imports() -> Iterator[None]:
    """Imports the stubs in place of the real modules within the context, except for modules already loaded."""
    import torch

    with replaced(importlib.metadata, "packages_distributions", dict):
        import transformers.utils

    utils: Any = transformers.utils
    spec = importlib.util.find_spec(_COMPILER)
    if _COMPILER in sys.modules or spec is None:
        yield
        return
    compiler, sources = ModuleType(_COMPILER), ModuleType(_SOURCES)
    compiler.__spec__, compiler.__file__ = spec, spec.origin
    compiler.__path__ = list(spec.submodule_search_locations or ())  # its submodules are the real ones
    members: dict[str, Any] = {
        "disable": _left_alone, "allow_in_graph": _left_alone, "assume_constant_result": _left_alone,
        "graph_break": _nothing, "mark_static_address": _nothing, "source": sources,
    }  # fmt: skip
    compiler.__dict__.update(members)
    sources.__dict__.update({"ConstantSource": _Source, "RandomValueSource": _Source})
    with_scipy = utils.is_scipy_available
    sys.modules[_COMPILER], sys.modules[_SOURCES] = compiler, sources
    torch._dynamo = compiler
    utils.is_scipy_available = _never
    try:
        # a trace's imports, made while the request is still to come; one that fails does so again when it is used
        with suppress(Exception):
            importlib.import_module("transformers.models.auto.modeling_auto")
            importlib.import_module("flopcast.roofline.stream.tracer.trace")
        yield
    finally:
        utils.is_scipy_available = with_scipy
        del torch._dynamo
        for name in [name for name in sys.modules if name == _COMPILER or name.startswith(f"{_COMPILER}.")]:
            del sys.modules[name]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute of a module or a class another value within the context."""
    original = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Source:
    """Stands for the source of a compiler's tensor."""

    def __init__(self, *_: Any) -> None: ...


def _left_alone(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """A decorator that returns the function unchanged; used with arguments or without."""
    return _left_alone if function is None else function


def _nothing(*_: Any, **__: Any) -> None: ...


def _never() -> bool:
    return False
