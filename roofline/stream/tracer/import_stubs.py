"""Stubs for what importing torch and transformers loads and a trace does not use: a fifth of its time.

- `torch._dynamo`, the compiler: fake tensors read its configuration and optimizers ask it to leave functions alone. It
  brings inductor, onnx and more, 0.7 s. Its configuration is the real one, functions are left alone.
- scipy.optimize, which transformers' losses of object detection match boxes with: 0.3 s.
- Which distribution each installed package is of, 0.1 s: transformers asks by the package's own name, too.

For a process that traces and ends: what was imported meanwhile would compile nothing. A trace that needs more fails,
and is made again without stubs.
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
    """Within it the stubs are imported in place of the real modules, but for those that are loaded already."""
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
        # what a trace imports, while whoever asks for it is not ready yet; what cannot be fails again when it is used
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
    """Within it an attribute of a module or a class has another value."""
    original = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Source:
    """Where a compiler's tensor comes from."""

    def __init__(self, *_: Any) -> None: ...


def _left_alone(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """As a decorator, with arguments or without."""
    return _left_alone if function is None else function


def _nothing(*_: Any, **__: Any) -> None: ...


def _never() -> bool:
    return False
