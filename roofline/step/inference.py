"""What is asked of a call of inference besides its time: its memory by part, and where decode turns matrix-bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.memory.peak import cache_bytes, is_scale
from flopcast.roofline.stream.lowering.classes import op_class
from flopcast.roofline.stream.ops.op_stream import Stream, packet


class Roofs(NamedTuple):
    """FLOPs per second of the matrix units, sustained, and bytes per second that memory is read at."""

    matrix: float
    bandwidth: float


def roofs_for(dtype: str, profile: Profile) -> Roofs | None:
    """Returns the roofs of calls in a dtype; None where the GPU has no matrix rate of it."""
    bandwidth = profile.ceilings.get("hbm_read") or profile.ceilings["hbm_copy"]
    matrix = profile.ceilings.get(f"matrix_sustained/{dtype}") or profile.peaks.get(dtype)
    return None if matrix is None else Roofs(matrix.value, bandwidth.value)


def memory_parts(stream: Stream, peak: int) -> Mapping[str, int]:
    """Returns the peak's bytes by part: weights, the cache of keys and values that the call leaves, and the rest, which
    is activations, buffers and workspaces, and what a growing cache holds twice."""
    scales = sum(storage.bytes for storage in stream.storages if is_scale(storage))
    weights, cache = stream.parameter_bytes + scales, cache_bytes(stream)
    return {"weights": weights, "cache": cache, "rest": peak - weights - cache}


def weight_bytes(stream: Stream) -> int:
    """Returns the bytes of the weights that products read, each once, as they are kept: a product may read a cast."""
    kept = {i: i for i, storage in enumerate(stream.storages) if storage.kind == "parameter"}
    read: set[int] = set()
    for op in stream.ops:
        sources = {kept[storage] for i in op.inputs if (storage := stream.tensors[i].storage) in kept}
        if op_class(op.name) == "gemm":
            read |= sources
        elif packet(op.name) == "aten._to_copy" and sources:
            kept[stream.tensors[op.outputs[0]].storage] = sources.pop()
    if "repeated" in stream.meta:  # one compiled layer stands for several: of all, but for a table that is looked up
        return stream.parameter_bytes - _looked_up(stream, read)
    return sum(stream.storages[storage].bytes for storage in read)


def _looked_up(stream: Stream, read: set[int]) -> int:
    """Bytes of the largest parameters outside of layers that no product reads, such as untied embeddings."""
    return sum(
        storage.bytes
        for number, storage in enumerate(stream.storages)
        if storage.kind == "parameter" and storage.layer is None and number not in read
    )


def least_bytes(stream: Stream) -> int:
    """Returns the bytes that a call has to move: the weights of its products and the cache that it leaves, once each.
    Of a cache that has more places than tokens those count too: they are read under a mask."""
    return weight_bytes(stream) + cache_bytes(stream)


def turning_batch(stream: Stream, flops: int, dtype: str, profile: Profile) -> float | None:
    """Returns the batch from which the roofline of one decode is bound by the matrix units, not by memory.

    Each sequence adds its FLOPs and its cache, read once; the weights of products are read once for all. `flops`: of
    the products and the attention of the stream. None where a sequence's cache takes longer to read than its FLOPs
    take: then no batch turns it. It ignores kernels' efficiency, element-wise work and the host.
    """
    roofs = roofs_for(dtype, profile)
    if roofs is None:
        return None
    batch = int(stream.meta["batch"])
    each = flops / batch / roofs.matrix - cache_bytes(stream) / batch / roofs.bandwidth
    return weight_bytes(stream) / roofs.bandwidth / each if each > 0 else None
