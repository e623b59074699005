"""The op stream of a step of many micro-batches from one of four: from the third on, each launches the same calls.

The first micro-batch makes the gradients, the others add to them; and the memory that the second finds was left by the
first, that of the third by one like itself. So a stream of TRACED micro-batches serves any larger number: the third
stands for all that are missing, and `times_run` says for each op how often it runs. What is left in L2 settles within
three micro-batches too, unless a whole one fits into it; then kernels differ by 0.1% at most.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from flopcast.roofline.stream.ops.op_stream import NotDerivable, Op, Stream

TRACED = 4
_REPEATED = 2  # index of the micro-batch that stands for others
_META = "micro_batches_alike"  # in a stream's meta: for how many it stands, itself included


def to_micro_batches(stream: Stream, count: int) -> Stream:
    """The stream of a step of `count` micro-batches, more than TRACED, from one of TRACED. Its ops stay as they are.

    Raises NotDerivable where the last micro-batches differ, or cannot be told apart.
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
    """For each op how often it runs in a step: once, but for those of a micro-batch that stands for several."""
    times = [1] * len(stream.ops)
    alike = int(stream.meta.get(_META, 1))
    if alike > 1:
        blocks = _micro_batches(stream)
        if len(blocks) == TRACED:
            block = blocks[_REPEATED]
            times[block] = [alike] * (block.stop - block.start)
    return times


def _micro_batches(stream: Stream) -> list[slice]:
    """The ops of each forward with its backward, in order."""
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
    """What tells an op from others, apart from the storages it works on."""
    operands = [stream.tensors[i].operand for i in (*op.inputs, *op.outputs)]
    return op.name, op.kind, op.args, op.kwargs, op.written, op.layer, op.module, operands
