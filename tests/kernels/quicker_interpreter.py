"""Triton's interpreter without what it does in vain or anew, two thirds of its time. A plugin of pytest for
`test_interpreted.py`; what kernels compute, and what the interpreter refuses, stays as it is.

In vain: it computes whether each sum of integers overflows, and looks at the answer in a debug mode alone that it has
no switch for. Anew: at every call of a function in a kernel it replaces the members of `triton.language` once more, and
for every value it makes the type of its block and the shape as a tuple of constants. Python's collections of garbage
are as rare as in the other tests (`tests/conftest.py`, which the interpreter's process does not load): an eighth.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from typing import Any

from triton.language import core
from triton.runtime import interpreter

gc.set_threshold(50_000, 20, 100)


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


# --- Once a launch: what a launch has replaced, the functions that its kernel calls need not replace again.

_whole_scope, _whole_lang = interpreter._LangPatchScope, interpreter._patch_lang
_replaced: set[str] = set()  # names of the modules whose members this launch has replaced


class _Scope(_whole_scope):  # type: ignore[misc, valid-type]
    def restore(self) -> None:
        _replaced.clear()
        super().restore()


@functools.cache
def _modules_of(function: Any) -> frozenset[str]:
    """The modules of which `_patch_lang` replaces the members for a function."""
    seen = [value for value in function.__globals__.values() if isinstance(value, type(core))]
    return frozenset(value.__name__ for value in seen if value in (interpreter.tl, core))


def _patch_lang(function: Any) -> Any:
    wanted = _modules_of(function)
    if wanted and wanted <= _replaced:
        return _whole_scope()  # of nothing
    scope = _whole_lang(function)
    _replaced.update(wanted)
    return scope


# --- Once a type: blocks of the same elements and shape are of one type, whose tensors have one shape.

_make_block, _make_tensor = core.block_type.__init__, core.tensor.__init__
_blocks: dict[Any, tuple[Any, dict[str, Any]]] = {}  # the element type, so that its id stays its own, and all fields


def _block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    key = id(element_ty), sizes
    known = _blocks.get(key)
    if known is None:
        _make_block(self, element_ty, shape)
        _blocks[key] = element_ty, dict(self.__dict__)
    else:
        self.__dict__.update(known[1])


_shapes: dict[Any, tuple[Any, Any]] = {}  # (shape, number of elements) of tensors, by the sizes of their block


def _tensor(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape.values) if type.is_block() else ()
    known = _shapes.get(sizes)
    if known is None:
        _make_tensor(self, handle, type)
        _shapes[sizes] = self.shape, self.numel
    else:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known


_broadcast = interpreter.TritonSemantic.broadcast_impl_value


def _broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
    """Blocks of one shape, and scalars, are left as they are."""
    one, other = lhs.type, rhs.type
    if one.is_block() and other.is_block():
        if one.shape.values == other.shape.values:
            return lhs, rhs
    elif not one.is_block() and not other.is_block():
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


interpreter._patch_builtin, interpreter._get_np_dtype = _patch_builtin, _get_np_dtype
interpreter._LangPatchScope, interpreter._patch_lang = _Scope, _patch_lang
core.block_type.__init__, core.tensor.__init__ = _block, _tensor
interpreter.TritonSemantic.broadcast_impl_value = _broadcast_unlike
_options = interpreter.interpreter_builder.options
if not _options.debug:
    interpreter.interpreter_builder.options = dataclasses.replace(_options, sanitize_overflow=False)
