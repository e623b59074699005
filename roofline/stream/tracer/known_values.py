"""Values that a step in good health has: no loss is NaN, no gradient infinite.

Fake tensors have no values; a step that checks for NaN, as gradient scalers and careful loops do, takes the branch that
a real one takes. What follows from such a check (`torch.isnan(loss).any() | ...`) is known too, and numbers from zero
to zero, by which models without stochastic depth leave it out. A single number drawn from 0 to 1 counts as its mean:
models that drop layers at random compare such a one with the share to drop, which is less than a half, and so keep
each. All elements of a tensor with a known value are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

Value = bool | int | float

_HEALTHY = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}
# Calls whose result has the value of their first operand.
_SAME = {
    "any", "all", "max", "min", "amax", "amin", "mean", "clone", "detach", "alias", "_to_copy", "view", "_unsafe_view",
    "reshape", "expand", "squeeze", "unsqueeze", "select", "slice", "t", "transpose", "permute",
}  # fmt: skip
_PARTS = {"split", "split_with_sizes", "unbind"}  # calls that give several such
_OF_ONE: dict[str, Callable[[Value], Value]] = {"logical_not": lambda a: not a, "bitwise_not": lambda a: not a}
_OF_TWO: dict[str, Callable[[Value, Value], Value]] = {
    "logical_or": lambda a, b: bool(a or b), "bitwise_or": lambda a, b: bool(a or b),
    "logical_and": lambda a, b: bool(a and b), "bitwise_and": lambda a, b: bool(a and b),
    "mul": lambda a, b: a and b, "add": lambda a, b: a + b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip


def value_of(function: Any, args: tuple[Any, ...], known: MutableMapping[torch.Tensor, Value]) -> Value | None:
    """Returns the value of what an operator returns, None where it is not known. `known`: values of tensors."""
    name: str = function._schema.name.removeprefix("aten::")
    if name == "linspace" and args[0] == args[1]:
        start: Value = args[0]
        return start
    if name == "rand" and math.prod(args[0]) == 1:
        return 0.5
    if name in _HEALTHY:
        return _HEALTHY[name]
    if name in ("eq", "ne") and len(args) == 2:
        is_nan_check = args[0] is args[1]  # a number that differs from itself is NaN
        is_infinity_check = isinstance(args[1], float) and math.isinf(args[1])
        if is_nan_check or is_infinity_check:
            return bool((name == "eq") == is_nan_check)
    values: list[Any] = [known.get(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if not values or not isinstance(values[0], (bool, int, float)) or not isinstance(args[0], torch.Tensor):
        return None
    if name in _SAME | _PARTS:
        found: Value = values[0]
        return found
    if name == "sum" and not values[0]:
        return 0
    if name in _OF_ONE:
        return _OF_ONE[name](values[0])
    if name in _OF_TWO and len(values) > 1 and isinstance(values[1], (bool, int, float)):
        return _OF_TWO[name](values[0], values[1])
    return None


def learn(function: Any, args: tuple[Any, ...], result: Any, known: MutableMapping[torch.Tensor, Value]) -> None:
    """Adds to `known` what a call tells."""
    if function is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
        known[args[1]] = 0.0  # whether an infinity was found among the gradients
        return
    is_parts = isinstance(result, (list, tuple)) and function._schema.name.removeprefix("aten::") in _PARTS
    results = [result] if isinstance(result, torch.Tensor) else result if is_parts else []
    value = value_of(function, args, known) if results else None
    if value is not None:
        for tensor in results:
            known[tensor] = value
