"""What is asked of a call of inference besides its time: its memory by part, and where decode turns matrix-bound."""

from __future__ import annotations

from collections.abc import Mapping

from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.memory import cache_bytes
from flopcast.roofline.stream.lowering.classes import op_class
from flopcast.roofline.stream.ops.op_stream import Stream


def memory_parts(stream: Stream, peak: int) -> Mapping[str, int]:
    """Returns the peak's bytes by part: weights, the cache of keys and values that the call leaves, and the rest, which
    is activations, buffers and workspaces, and what a growing cache holds twice."""
    weights, cache = stream.parameter_bytes, cache_bytes(stream)
    return {"weights": weights, "cache": cache, "rest": peak - weights - cache}


def turning_batch(stream: Stream, flops: int, dtype: str, profile: Profile) -> float | None:
    """Returns the batch from which the roofline of one decode is bound by the matrix units, not by memory.

    Each sequence adds its FLOPs and its cache, read once; the weights of products are read once for all. `flops`: of
    the products and the attention of the stream. None where a sequence's cache takes longer to read than its FLOPs
    take: then no batch turns it. It ignores kernels' efficiency, element-wise work and the host.
    """
    bandwidth = profile.ceilings.get("hbm_read") or profile.ceilings["hbm_copy"]
    matrix = profile.ceilings.get(f"matrix_sustained/{dtype}") or profile.peaks.get(dtype)
    if matrix is None:
        return None
    read = {
        stream.tensors[i].storage
        for op in stream.ops
        if op_class(op.name) == "gemm"
        for i in op.inputs
        if stream.storages[stream.tensors[i].storage].kind == "parameter"
    }
    batch = int(stream.meta["batch"])
    weights = sum(stream.storages[storage].bytes for storage in read) / bandwidth.value
    each = flops / batch / matrix.value - cache_bytes(stream) / batch / bandwidth.value
    return weights / each if each > 0 else None
