"""Says which storages each op of a stream frees and touches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flopcast.roofline.stream.ops.op_stream import Stream, once_per_stream


class Touch(NamedTuple):
    """Of an op: the storages that are freed before it, those that it is the first to touch since they were last freed,
    and all that it touches, in the order of its operands, with the most bytes of them that one operand covers."""

    freed: tuple[int, ...]
    first: tuple[int, ...]
    bytes: Mapping[int, int]


@once_per_stream
def touches(stream: Stream) -> list[Touch]:
    """Returns what each op touches: both L2 and the allocator are followed through it."""
    storages = [ref.storage for ref in stream.tensors]
    operands = [ref.operand.bytes for ref in stream.tensors]
    found = []
    there: set[int] = set()
    for op in stream.ops:
        freed = op.freed
        if freed:
            there.difference_update(freed)
        touched: dict[int, int] = {}
        for index in op.inputs + op.outputs:
            storage, size = storages[index], operands[index]
            if storage not in touched or size > touched[storage]:
                touched[storage] = size
        first: tuple[int, ...] = ()
        if not there.issuperset(touched):
            first = tuple([storage for storage in touched if storage not in there])
            there.update(first)
        found.append(tuple.__new__(Touch, (freed, first, touched)))  # as Touch(...), which calls a function first
    return found
