"""What a mask and dropout add to an attention call, over the same call without them.

With a mask (a tensor that is added to the scores) cuDNN runs other kernels: their tiles have 64 rows instead of 128, so
that one group of warps adds mask and softmax while no other multiplies, and no tile is skipped however much of it is
masked. All that the kernel does after its start takes longer by one factor, whether its heads have 64 or 128 columns.
The backward's other kernels, a dot product per row and a rounding, know of no mask: they move bytes.

In fp32 the memory-efficient kernel runs, with a mask the same one: it reads the mask's elements of every head beside.
Twelve heads of 640 tokens and 128 columns in a compiled step took 74 and 205 us on an H200, said are 71 and 208.

Dropout draws a random number per pair of query and key, and again in the backward (Philox), by the SMs' integer units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flopcast.bounds import NonNegative, Positive
from flopcast.kernels.shapes import DTYPE_BYTES, Attention
from flopcast.roofline.gpu.laws.generated import Rates

# Bytes that the backward's other kernels move, over those of one operand of as many elements as the queries: they read
# the result and its gradient, clear the queries' gradient in fp32, read it and write it rounded.
OTHER_KERNELS = 7.0


class Direction(NamedTuple):
    """Of the forward or the backward: by how much a masked kernel takes longer (`slower`, of its time after `start`
    seconds), and the clocks of an SM that one random number takes (`random`)."""

    slower: NonNegative
    start: NonNegative
    random: NonNegative


@dataclass(frozen=True, kw_only=True)
class MaskLaw:
    """`moved`: share of the datasheet's bandwidth that the backward's other kernels reach."""

    fwd: Direction
    bwd: Direction
    moved: Positive


def seconds(shape: Attention, plain: float, rates: Rates, law: MaskLaw) -> float:
    """The time of a call that takes `plain` seconds without mask and dropout."""
    found = plain
    of = law.fwd if shape.direction == "fwd" else law.bwd
    if shape.mask and shape.dtype == "fp32":
        elements = shape.batch * shape.heads * shape.seq * shape.seq
        found += elements * DTYPE_BYTES[shape.dtype] / rates.bandwidth
    elif shape.mask:
        found += of.slower * max(plain - of.start - other_seconds(shape, rates, law.moved), 0.0)
    if shape.dropout:
        pairs = shape.batch * shape.heads * shape.seq * shape.seq / (2 if shape.causal else 1)
        found += of.random * pairs / (rates.sm_count * rates.clock)
    return found


def other_seconds(shape: Attention, rates: Rates, moved: float) -> float:
    """Of the backward's kernels beside the one that multiplies."""
    if shape.direction == "fwd":
        return 0.0
    queries = shape.batch * shape.heads * shape.seq * shape.head_dim * DTYPE_BYTES[shape.dtype]
    return OTHER_KERNELS * queries / (moved * rates.bandwidth)
