"""Joins the gradients of a data-parallel step into DistributedDataParallel's buckets.

Buckets cross layers, so that a step with them cannot be unfolded. It is traced with a bucket per gradient instead,
unfolded, and its gradients are joined by torch's rule (torch/csrc/distributed/c10d/reducer.cpp,
`compute_bucket_assignment_by_size`): in the order in which they become ready, a bucket is closed by the gradient that
fills it, the first at 1 MiB and the others at 25 MiB.
"""

from __future__ import annotations

from dataclasses import replace

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.ops.op_stream import NotDerivable, Op, Storage, Stream, TensorRef

FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
BUCKET_EACH = 2.0**-20  # MiB, one byte: a bucket of DistributedDataParallel's for each gradient
_ALL_REDUCE, _VIEW = "c10d.allreduce_.default", "aten.as_strided.default"


def to_buckets(stream: Stream, first: int = FIRST_BYTES, most: int = BUCKET_BYTES) -> Stream:
    """Returns the stream with its gradients in buckets, each reduced once it is full. Raises NotDerivable for gradients
    of several types, which torch puts into buckets of their own.

    Buckets live through the whole step: `kind` "bucket".
    """
    reduced = _reductions(stream)
    gradients = [stream.tensors[stream.ops[i].inputs[0]] for i in reduced]
    if len({ref.operand.dtype for ref in gradients}) > 1:
        raise NotDerivable("gradients of several types")
    tensors, storages = list(stream.tensors), list(stream.storages)
    in_bucket: dict[int, int] = {}  # by the storage of a gradient: that of its bucket
    full: dict[int, int] = {}  # by the all-reduce that closes a bucket: what it reduces
    start = 0
    for place, ref in enumerate(gradients):
        in_bucket[ref.storage] = len(storages)
        size = sum(g.operand.bytes for g in gradients[start : place + 1])
        if size >= (most if full else first) or place == len(gradients) - 1:
            count = sum(g.operand.numel for g in gradients[start : place + 1])
            full[reduced[place]] = len(tensors)
            tensors.append(TensorRef(Operand((count,), (1,), ref.operand.dtype), len(storages)))
            storages.append(Storage(size, "bucket", None))
            start = place + 1
    tensors = [ref._replace(storage=in_bucket.get(ref.storage, ref.storage)) for ref in tensors]
    dropped = set(reduced) - full.keys()
    views = _last_views(stream, reduced)
    numbers: dict[int, int] = {}  # of the ops that stay
    ops: list[Op] = []
    repeats: list[int] = []
    freed: tuple[int, ...] = ()  # by ops that do not stay
    for i, op in enumerate(stream.ops):
        freed += op.freed
        if i in dropped or i in views[1:]:
            continue
        numbers[i] = len(ops)
        kept = op._replace(inputs=(full[i],), outputs=(full[i],)) if i in full else op
        if op.waits or freed != op.freed:
            kept = kept._replace(waits=tuple(sorted(numbers[wait] for wait in op.waits)), freed=freed)
        freed = ()
        more = len(gradients) - 1 if views and i == views[0] else 0  # the reducer looks at every gradient
        ops += [kept, *[kept._replace(freed=(), waits=())] * more]
        repeats += [stream.repeats[i] if stream.repeats else -1] * (1 + more)
    return replace(stream, ops=tuple(ops), tensors=tuple(tensors), storages=tuple(storages), repeats=tuple(repeats))


def with_buckets(stream: Stream) -> Stream:
    """Returns a stream that was traced with torch's own buckets, told as such."""
    buckets = {stream.tensors[stream.ops[i].inputs[0]].storage for i in _reductions(stream)}
    storages = [one._replace(kind="bucket") if i in buckets else one for i, one in enumerate(stream.storages)]
    return replace(stream, storages=tuple(storages))


def _reductions(stream: Stream) -> list[int]:
    """The ops that reduce gradients. On lane 0 are those of other parts of a layout: a pipeline's, of the weight that
    two of its stages share."""
    return [i for i, op in enumerate(stream.ops) if op.name == _ALL_REDUCE and op.phase == "backward" and op.lane]


def _last_views(stream: Stream, reduced: list[int]) -> range:
    """Returns the ops after the last all-reduce by which the reducer looks at its buckets: one per gradient of the
    folded stream. A pipeline's later stages first work out what they send back."""
    start = reduced[-1] + 1 if reduced else len(stream.ops)
    while start < len(stream.ops) and stream.ops[start].name != _VIEW and stream.ops[start].phase == "backward":
        start += 1
    stop = start
    while stop < len(stream.ops) and stream.ops[stop].name == _VIEW:
        stop += 1
    return range(start, stop)
