"""Triton's interpreter without what it does anew at every call of a function in a kernel, a fifth of its time: looking
through all members of `triton.language` for those to replace, and making the table of numpy's types. A plugin of pytest
for `test_interpreted.py`; what is replaced, and by what, stays as it is."""

from __future__ import annotations

import functools
from typing import Any

from triton.language import core
from triton.runtime import interpreter


def _builtins(package: Any) -> list[str]:
    return [name for name in dir(package) if core.is_builtin(getattr(package, name, None))]


# before the first launch replaces any
_NAMES = {
    each: _builtins(each)
    for each in (interpreter.tl, core, core.tensor, interpreter.tl.math, core.tensor_descriptor_base)
}
_whole = interpreter._patch_builtin


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    if package not in _NAMES:
        _whole(package, builder, scope)
        return
    for name in _NAMES[package]:
        if core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


_numpy_type = interpreter._get_np_dtype
_of_numbers = functools.cache(_numpy_type)


def _get_np_dtype(of: Any) -> Any:
    """A block's is that of its elements; neither blocks nor pointers can be keys."""
    each = of.element_ty if isinstance(of, core.block_type) else of
    return _numpy_type(each) if isinstance(each, core.pointer_type) else _of_numbers(each)


interpreter._patch_builtin, interpreter._get_np_dtype = _patch_builtin, _get_np_dtype
