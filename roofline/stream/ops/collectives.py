"""The collectives of a rank's op stream: which kind, how many bytes, among how many ranks, on which lane."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from flopcast.roofline.stream.ops.op_stream import Op, Stream, once_per_stream, packet

# By the operator: the kind, as NCCL's tests name it, and the argument whose bytes these tests count. That is what all
# ranks together get or give: the gathered result, the whole that is scattered, for others the one buffer.
KINDS = {
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.send": ("send_recv", 0),
    "c10d.recv_": ("send_recv", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_reduce_": ("all_reduce", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
    "_c10d_functional.broadcast": ("broadcast", 0),
}  # fmt: skip
BARRIER = "c10d.barrier"  # sends nothing that takes time


def is_collective(name: str) -> bool:
    """Whether an operator, without its overload, is one of these."""
    return name in KINDS


class Collective(NamedTuple):
    """`op`: its place in the stream. `bytes`: as NCCL's tests count them. `ranks` of a group stand `stride` apart.
    `dtype`: of what is sent. `lane`: the CUDA stream. Of what one stage of a pipeline sends to the next: `peer`, that
    other's number, `is_sent` or received, `together` the batch that is one kernel (0: it is one by itself)."""

    op: int
    kind: str
    bytes: int
    ranks: int
    stride: int
    dtype: str
    lane: int
    peer: int = -1
    is_sent: bool = False
    together: int = 0


@once_per_stream
def collectives(stream: Stream) -> list[Collective]:
    """Lists the collectives of a stream in the order in which the host asks for them."""
    found = []
    for place, op in enumerate(stream.ops):
        known = KINDS.get(packet(op.name))
        if known is not None:
            found.append(_collective(stream, place, op, *known))
    return found


def _collective(stream: Stream, place: int, op: Op, kind: str, argument: int | None) -> Collective:
    args = json.loads(op.args)
    sent = op.outputs if argument is None else _tensors(op, args[argument])
    operands = [stream.tensors[i].operand for i in sent]
    ranks, stride = next(value["g"] for value in args if isinstance(value, dict) and "g" in value)
    size = sum(operand.bytes for operand in operands)
    if kind == "send_recv":  # to the next stage, or from it
        together = json.loads(op.kwargs).get("together", 0)
        is_sent = packet(op.name) == "c10d.send"
        return Collective(place, kind, size, 2, stride, operands[0].dtype, op.lane, args[2], is_sent, together)
    return Collective(place, kind, size, ranks, stride, operands[0].dtype, op.lane)


def _tensors(op: Op, value: Any) -> tuple[int, ...]:
    """Returns the tensors of an argument: one, or a list."""
    first, count = value["ts"] if "ts" in value else (value["t"], 1)
    return op.inputs[first : first + count]
