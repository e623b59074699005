"""Checks the shape that a row of a measurement file says it is of."""

from __future__ import annotations

from typing import Any

from flopcast.decode import Check, Wrong, decoder, parse_json, refused, show
from flopcast.kernels.shapes import (
    DTYPE_BYTES,
    AdamW,
    Attention,
    CrossEntropy,
    Gemm,
    Operand,
    RmsNorm,
    RopeQkNorm,
    SwiGlu,
)

_CHECKS: dict[str, Check] = {
    kind.__name__.lower(): decoder(kind) for kind in (Gemm, Attention, RmsNorm, RopeQkNorm, SwiGlu, CrossEntropy, AdamW)
}
_operand = decoder(Operand)
# Operands known to be right. Some hundreds make up the ten thousands of a file; checking one takes ten times as long as
# finding it here.
_known: set[tuple[Any, ...]] = set()
_MOST_KNOWN = 100_000


def checked_shape(value: Any) -> Any:
    """A shape as `kernels.shapes.shape_to_json` writes it, as it is. Raises Wrong for anything else."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "call":
        return _checked_call(value)
    check = _CHECKS.get(kind) if isinstance(kind, str) else None
    if check is None:
        raise refused(kind, f"one of call, {', '.join(_CHECKS)}").within("kind")
    if value.get("dtype", "bf16") not in DTYPE_BYTES:
        raise refused(value["dtype"], f"one of {', '.join(DTYPE_BYTES)}").within("dtype")
    check(value)
    return value


def _checked_call(value: dict[str, Any]) -> dict[str, Any]:
    for side in ("inputs", "outputs"):
        operands = value.get(side)
        if type(operands) is not list:
            raise refused(operands, "a list of operands").within(side)
        for place, operand in enumerate(operands):
            try:
                _check_operand(operand)
            except Wrong as wrong:
                raise wrong.within(place).within(side) from None
    written = value.get("written", ())
    if type(written) not in (list, tuple) or not set(written) <= set(range(len(value["inputs"]))):
        raise refused(written, "a list of places among the inputs").within("written")
    for name, kind, default in (("op", str, None), ("args", list, "[]"), ("kwargs", dict, "{}")):
        text = value.get(name, default)
        if type(text) is not str:
            raise refused(text, "a text").within(name)
        if kind is not str and text != default:
            try:
                found = parse_json(text)
            except ValueError as error:
                raise Wrong(f"is {show(text)}: {error}").within(name) from None
            if type(found) is not kind:
                raise refused(text, "the arguments of a call as JSON").within(name)
    return value


def _check_operand(value: Any) -> None:
    try:
        key = (*value["shape"], None, *value["stride"], value["dtype"])
        if key in _known and not {float, bool} & set(map(type, key)):  # 1.0 and True equal 1
            return
    except (LookupError, TypeError):
        key = ()
    operand: Operand = _operand(value)
    if operand.dtype not in DTYPE_BYTES:
        raise refused(operand.dtype, f"one of {', '.join(DTYPE_BYTES)}").within("dtype")
    if len(operand.shape) != len(operand.stride):
        raise Wrong(f"has {len(operand.shape)} sizes and {len(operand.stride)} strides")
    if len(_known) < _MOST_KNOWN:
        _known.add(key)
