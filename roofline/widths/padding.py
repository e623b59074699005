"""Which products of a compiled step inductor pads: it widens operands whose rows tensor cores read badly.

Inductor's pass `pad_mm` widens a product's sizes to multiples of 8 (in 16 bits) where it finds the product faster so,
copies included; passes that write an operand anyway write it wider. What is padded is read off the generated code: a
product that the eager step has with one of its sizes less.
"""

from __future__ import annotations

from itertools import product

from flopcast.kernels.shapes import DTYPE_BYTES, Gemm
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_micro_batches import times_run

ALIGNED_BYTES = 16  # of a row: 8 elements in 16 bits, 4 in fp32 (`torch._inductor.fx_passes.pad_mm`)


def padded_products(compiled: Stream, eager: Stream) -> tuple[int, int]:
    """(products of a compiled step that are padded, all of them), the eager step given."""
    known = {_sizes(gemm) for gemm, _ in _products(eager)}
    wider = {sizes for gemm, _ in _products(eager) for sizes in _wider(gemm)} - known
    found = [(_sizes(gemm) in wider, times) for gemm, times in _products(compiled)]
    return sum(times for is_padded, times in found if is_padded), sum(times for _, times in found)


def _products(stream: Stream) -> list[tuple[Gemm, int]]:
    """The matrix products of a step, and how often each runs."""
    lowered = ((lower(stream, op), times) for op, times in zip(stream.ops, times_run(stream), strict=True))
    return [(work[0], times) for work, times in lowered if work is not None and isinstance(work[0], Gemm)]


def _sizes(gemm: Gemm) -> tuple[int, ...]:
    """A product's sizes, whatever its layout: a gradient may be computed transposed."""
    return tuple(sorted((gemm.m, gemm.n, gemm.k)))


def _wider(gemm: Gemm) -> set[tuple[int, ...]]:
    """The sizes that a product has where one or more of them are padded."""
    align = ALIGNED_BYTES // DTYPE_BYTES[gemm.dtype]
    each = ({size, -(-size // align) * align} for size in (gemm.m, gemm.n, gemm.k))
    return {tuple(sorted(sizes)) for sizes in product(*each)}
