"""Derives the op stream of any batch from those of two: sizes of a step are linear in its batch.

This takes milliseconds, a trace one second, for which a sweep over batches and the search for the largest batch would
wait every time. Two streams of neighbouring batches that have the same operations give every size (shapes, strides,
bytes, numbers among the arguments) as a straight line. Where they differ in anything else, the stream has to be traced.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.ops.op_stream import NotDerivable, Storage, Stream, TensorRef

# The batches that are traced. Not 1: the stride of a dimension of size 1 is arbitrary, and calls take other paths.
BATCHES = (2, 3)


def to_batch(low: Stream, high: Stream, batch: int) -> Stream:
    """Derives the stream of `batch` from those of BATCHES. Raises NotDerivable where they differ beyond sizes."""
    first, second = BATCHES
    steps = batch - first

    def line(a: Any, b: Any) -> Any:
        """Extrapolates to `batch` a value that is `a` and `b` at BATCHES: integers linearly; all else must be equal."""
        if a == b:
            return a
        if isinstance(a, int) and isinstance(b, int) and not isinstance(a, bool):
            return a + (b - a) * steps // (second - first)
        if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
            return type(a)(line(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
            return {key: line(a[key], b[key]) for key in a}
        raise NotDerivable(f"{a!r} and {b!r}")

    def text(a: str, b: str) -> str:
        return a if a == b else json.dumps(line(json.loads(a), json.loads(b)), separators=(",", ":"))

    if len(low.ops) != len(high.ops) or len(low.storages) != len(high.storages):
        raise NotDerivable("another number of operations")
    ops = []
    for a, b in zip(low.ops, high.ops, strict=True):
        if a == b:
            ops.append(a)
            continue
        if a._replace(args="", kwargs="") != b._replace(args="", kwargs=""):
            raise NotDerivable(f"{a.name} and {b.name}")
        ops.append(a._replace(args=text(a.args, b.args), kwargs=text(a.kwargs, b.kwargs)))
    if len(low.tensors) != len(high.tensors):
        raise NotDerivable("another number of tensors")
    tensors = []
    for s, t in zip(low.tensors, high.tensors, strict=True):
        if s.operand.dtype != t.operand.dtype or s.storage != t.storage:
            raise NotDerivable(f"{s} and {t}")
        shape, stride = line(s.operand.shape, t.operand.shape), line(s.operand.stride, t.operand.stride)
        tensors.append(TensorRef(Operand(shape, stride, s.operand.dtype), s.storage))
    storages = []
    for p, q in zip(low.storages, high.storages, strict=True):
        if p.kind != q.kind or p.layer != q.layer:
            raise NotDerivable(f"{p} and {q}")
        storages.append(Storage(line(p.bytes, q.bytes), p.kind, p.layer))
    return replace(
        low, ops=tuple(ops), tensors=tuple(tensors), storages=tuple(storages), meta={**low.meta, "batch": batch}
    )
