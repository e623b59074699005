"""What kernels take of torch's allocator while they run, which no ATen call shows."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp2

import numpy as np

from flopcast.kernels.shapes import DTYPE_BYTES, Attention, Call
from flopcast.roofline.gpu.laws import reduction
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.lowering.variants import CallVariant, ConvVariant
from flopcast.roofline.stream.ops.op_stream import Op, Stream, packet

_PARTIAL_SUM = 4  # bytes: fp32
_SUMS = ("aten.sum", "aten.mean", "aten.linalg_vector_norm")
_CONVOLUTIONS = ("aten.convolution", "aten.convolution_backward")
_CHANNELS_STEP = 8  # cuDNN's kernels of 16-bit numbers take channels by so many


def scratch_bytes(stream: Stream, op: Op, sm_count: int | None) -> int:
    """Returns the bytes that `op` takes while it runs on a GPU of `sm_count` multiprocessors; None: of one that is not
    known, whose sums are not divided among blocks."""
    kind = _kind(op.name)
    if kind == "attention":
        return _of_attention(stream, op)
    if kind == "sum":
        return _of_sum(stream.call(op), sm_count) if sm_count is not None else 0
    return _of_convolution(stream.call(op)) if kind == "convolution" else 0


def has_scratch(name: str) -> bool:
    """Whether an operation of this name may take memory while it runs."""
    return bool(_kind(name))


@lru_cache(maxsize=1024)
def _kind(name: str) -> str:
    """Which of those that take memory an operation is; "" for none."""
    if "attention" in name:
        return "attention"
    return "sum" if packet(name) in _SUMS else "convolution" if packet(name) in _CONVOLUTIONS else ""


def _of_attention(stream: Stream, op: Op) -> int:
    """cuDNN's backward adds up dQ in fp32 and keeps a number per query, and where heads share keys it writes each query
    head's dK and dV, which are then summed over the group."""
    work = lower(stream, op)
    if work is None or not isinstance(work[0], Attention) or work[0].direction != "bwd":
        return 0
    shape = work[0]
    own, values = shape.columns
    rows = shape.batch * shape.heads * shape.seq
    is_grouped = shape.heads != shape.kv_heads
    return rows * (4 * own + 4 + 2 * (own + values) * is_grouped)


@lru_cache(maxsize=4096)
def _of_sum(call: Call, sm_count: int) -> int:
    """Where many blocks share a result they leave partial sums in memory (Reduce.cuh, `global_memory_size`): those of
    the 1,536 results of a bias's gradient over 25,216 rows take 132 MiB on an H200."""
    work = describe(call)
    if work.op_class != "reduction" or not isinstance(work.variant, CallVariant):
        return 0
    count, results = (np.array([round(exp2(size))], dtype=float) for size in work.features[1:3])
    return round(float(reduction.plan(work.variant, results, count, sm_count).parts[0])) * _PARTIAL_SUM


@lru_cache(maxsize=4096)
def _of_convolution(call: Call) -> int:
    """Of channels first, cuDNN's kernels work on copies of input, result and weights with channels last; those of one
    place by one on the operands as they lie, and the gradient of weights by a partial sum for each image. As an H200
    took it for 16-bit convolutions of ResNet-18, ResNet-101 and MobileNetV2; of others nothing is known."""
    variant = describe(call).variant
    assert isinstance(variant, ConvVariant)
    item = DTYPE_BYTES[variant.dtype]
    if variant.layout != "nchw" or variant.form not in ("dense", "few", "unaligned", "point") or item != 2:
        return 0
    images, channels, results, sides, places, taps = (round(exp2(size)) for size in describe(call).features[:6])
    if variant.form == "point":
        return 0 if variant.direction in ("fwd", "dgrad") else images * channels * results * _PARTIAL_SUM
    padded = ceil(channels / _CHANNELS_STEP) * _CHANNELS_STEP
    weights = padded * results * taps if taps > 1 else 0
    return item * (images * (padded * sides + results * places) + weights)
