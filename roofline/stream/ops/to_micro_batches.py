"""Derives the op stream of a step of many micro-batches from one of four: from the third on, all launch the same calls.

The first micro-batch makes the gradients, the others add to them; and the second starts from the memory that the first
left, the third from that of a micro-batch like itself. So a stream of TRACED micro-batches serves any larger number:
the third stands for all that are missing, and `times_run` counts how often each op runs. The contents of L2 settle
within three micro-batches too, unless a whole one fits into L2; then kernel times differ by 0.1% at most.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from flopcast.roofline.stream.ops.op_stream import NotDerivable, Op, Stream

TRACED = 4
_REPEATED = 2  # index of the micro-batch that stands for others
_META = "micro_batches_alike"  # key in a stream's meta: the number of micro-batches it stands for, itself included


def to_micro_batches(stream: Stream, count: int) -> Stream:
    """Derives the stream of a step of `count` > TRACED micro-batches from one of TRACED. Its ops stay as they are.

    Raises NotDerivable where the last micro-batches differ, or cannot be delimited.
    """
    blocks = _micro_batches(stream)
    if len(blocks) != TRACED:
        raise NotDerivable(f"{len(blocks)} runs of forward and backward, {TRACED} micro-batches")
    third, last = ([_signature(stream, op) for op in stream.ops[block]] for block in blocks[_REPEATED:])
    if third != last:
        raise NotDerivable("the last two micro-batches make other calls")
    alike = count - TRACED + 1
    return replace(stream, meta={**stream.meta, "accumulate": count, _META: alike})


def times_run(stream: Stream) -> list[int]:
    """Counts how often each op runs per step: once, except for those of a micro-batch or of a compiled layer that
    stands for several."""
    times = layers_run(stream)
    alike = int(stream.meta.get(_META, 1))
    if alike > 1:
        blocks = _micro_batches(stream)
        if len(blocks) == TRACED:
            block = blocks[_REPEATED]
            times[block] = [alike * count for count in times[block]]
    return times


def layers_run(stream: Stream) -> list[int]:
    """Counts how often each op runs per micro-batch: once, except for those of a compiled layer that stands for
    several."""
    times = [1] * len(stream.ops)
    for start, stop, count in stream.meta.get("repeated", ()):
        times[start:stop] = [count] * (stop - start)
    return times


def _micro_batches(stream: Stream) -> list[slice]:
    """Returns the range of ops of each micro-batch, a forward with its backward, in order."""
    found: list[slice] = []
    start = end = 0
    before = ""
    for phase, run in groupby(stream.ops, key=lambda op: op.phase):
        if phase == "forward":
            start = end
        end += sum(1 for _ in run)
        if (before, phase) == ("forward", "backward"):
            found.append(slice(start, end))
        before = phase
    return found


def _signature(stream: Stream, op: Op) -> tuple[Any, ...]:
    """Returns what distinguishes an op from others, except the storages that it works on."""
    operands = [stream.tensors[i].operand for i in (*op.inputs, *op.outputs)]
    return op.name, op.kind, op.args, op.kwargs, op.written, op.layer, op.module, operands
