"""Derives the op stream of a step of many micro-batches from one of four: from the third on, all launch the same calls.

The first micro-batch makes the gradients, the others add to them; and the second starts from the memory that the first
left, the third from that of a micro-batch like itself. So a stream of TRACED micro-batches serves any larger number:
the third stands for all that are missing, and `times_run` counts how often each op runs. The contents of L2 settle
within three micro-batches too, unless a whole one fits into L2; then kernel times differ by 0.1% at most.

Of one rank of several GPUs the last micro-batch differs, which alone reduces gradients or gives back what was gathered,
and some operations wait for those of the micro-batch before. There the third is written out as often as it runs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from flopcast.roofline.stream.ops.op_stream import NotDerivable, Op, Stream

TRACED = 4
_REPEATED = 2  # index of the micro-batch that stands for others
_META = "micro_batches_alike"  # key in a stream's meta: the number of micro-batches it stands for, itself included


def to_micro_batches(stream: Stream, count: int) -> Stream:
    """Derives the stream of a step of `count` > TRACED micro-batches from one of TRACED. Its ops stay as they are,
    but for a rank of several GPUs.

    Raises NotDerivable where micro-batches that should be alike differ, or cannot be delimited.
    """
    blocks = _micro_batches(stream)
    if len(blocks) != TRACED:
        raise NotDerivable(f"{len(blocks)} runs of forward and backward, {TRACED} micro-batches")
    if "parallel" in stream.meta:
        _, *starts = (block.start for block in blocks)  # cp has calls between a backward and the next forward
        before, block = (slice(*ends) for ends in pairwise(starts))
        return _written_out(stream, before, block, count)
    third, last = ([_signature(stream, op) for op in stream.ops[block]] for block in blocks[_REPEATED:])
    if third != last:
        raise NotDerivable("the last two micro-batches make other calls")
    alike = count - TRACED + 1
    return replace(stream, meta={**stream.meta, "accumulate": count, _META: alike})


def _written_out(stream: Stream, before: slice, block: slice, count: int) -> Stream:
    """Returns the stream with the micro-batch `block`, which is like the one `before`, written out until there are
    `count` of them. Raises NotDerivable."""
    more, length = count - TRACED, block.stop - block.start
    storages, tensors = list(stream.storages), list(stream.tensors)
    numbers = {ref: number for number, ref in enumerate(tensors)}
    following = _following(stream, before, block)  # by storage: what plays its part in the next micro-batch
    for storage in set(following.values()) - following.keys():
        for _ in range(more):
            following[storage] = len(storages)
            storages.append(stream.storages[storage] if storage < len(stream.storages) else storages[storage])
            storage = following[storage]

    def later(storage: int, by: int) -> int:
        for _ in range(by if following.get(storage, storage) != storage else 0):
            storage = following[storage]
        return storage

    def copied(op: Op, by: int, storage_of: dict[int, int], tensor_of: dict[int, int]) -> Op:
        for tensor in (*op.inputs, *op.outputs):
            if tensor not in tensor_of:
                ref = stream.tensors[tensor]._replace(storage=later(stream.tensors[tensor].storage, by))
                tensor_of[tensor] = numbers.setdefault(ref, len(tensors))
                if tensor_of[tensor] == len(tensors):
                    tensors.append(ref)
        for storage in op.freed:
            storage_of.setdefault(storage, later(storage, by))
        return op._replace(
            inputs=tuple([tensor_of[i] for i in op.inputs]),
            outputs=tuple([tensor_of[i] for i in op.outputs]),
            freed=tuple([storage_of[i] for i in op.freed]),
            waits=tuple([wait + by * length * (wait >= before.start) for wait in op.waits]),
        )

    ops = list(stream.ops[: block.stop])
    for by in range(1, more + 1):
        where: tuple[dict[int, int], dict[int, int]] = {}, {}
        ops += [copied(op, by, *where) for op in stream.ops[block]]
    where = {}, {}
    ops += [copied(op, more, *where) for op in stream.ops[block.stop :]]
    repeats = stream.repeats and (
        *stream.repeats[: block.stop], *stream.repeats[block] * more, *stream.repeats[block.stop :]
    )  # fmt: skip
    return replace(
        stream, ops=tuple(ops), tensors=tuple(tensors), storages=tuple(storages), repeats=repeats,
        meta={**stream.meta, "accumulate": count},
    )  # fmt: skip


def _following(stream: Stream, before: slice, block: slice) -> dict[int, int]:
    """Returns, for each storage that micro-batch `before` uses, the one that plays its part in the like micro-batch
    `block` after it; the same where all share it. Raises NotDerivable."""
    second, third = ([_signature(stream, op) for op in stream.ops[part]] for part in (before, block))
    if second != third:
        raise NotDerivable("the second and the third micro-batch make other calls")
    found: dict[int, int] = {}
    for one, other in zip(stream.ops[before], stream.ops[block], strict=True):
        pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
        for old, new in ((stream.tensors[i].storage, stream.tensors[j].storage) for i, j in pairs):
            if found.setdefault(old, new) != new:
                raise NotDerivable("the second and the third micro-batch use memory in other ways")
    known = found.keys() | found.values()
    if not all(known.issuperset(op.freed) for op in stream.ops[block]):
        raise NotDerivable("the third micro-batch frees what is older than the second")
    return found


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
