"""What a compiled step's products take whose padding depends on timings, and by how much it may be less or more.

Inductor pads a product whose rows tensor cores cannot read 16 bytes at a time where it finds that faster, by timing
both while it compiles. The generated code of a forecast pads as a quick host does
(`stream/tracer/compiler/padding.py`); another run leaves some of the close calls as they are. Of those that the host
decides a third was left, which the forecast has; what the GPU decides is forecast padded. The interval of the device's
seconds reaches from all of them padded to none. What the generated code leaves as it is was not close.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.tracer.compiler.asked import PADDED_BY_ANY_HOST_SECONDS

_ALIGN = 8  # elements of 16 bits, to whose multiples sizes are padded

# The share of products that the host decides upon that were left as they are: 26 of the 75 that five processes timed,
# on an H100's slow host 14 of 15, on a quick one 1, 1 and 3, on an H200's 7 (`pads.json` of both).
SHARE_LEFT = 26 / 75


class UnsurePad(NamedTuple):
    """Of an operation with a product that the generated code pads: how many seconds longer it takes as it is, and how
    likely another run leaves it so."""

    more_seconds: float
    chance_left: float


def unsure_pads_of(ops: Sequence[TimedOp], pads: Iterable[Sequence[int]], profile: Profile) -> dict[int, UnsurePad]:
    """Returns by number the operations with products of `pads`, (m, k, n) each, that would take longer as they are. The
    copies into paddings, which would be saved, are not taken off."""
    as_they_are = {tuple(-(-size // _ALIGN) * _ALIGN for size in pad): pad for pad in pads}
    if not as_they_are:
        return {}
    padded, asked = [], []
    for number, op in enumerate(ops):
        shape = None if op.work is None else op.work.shape
        if isinstance(shape, Gemm) and (shape.m, shape.k, shape.n) in as_they_are:
            m, k, n = as_they_are[shape.m, shape.k, shape.n]
            padded.append(number)
            asked.append((describe(replace(shape, m=m, k=k, n=n)), "torch", "cold"))
    found = profile.estimate(asked)
    return {
        number: UnsurePad(more, SHARE_LEFT if one.seconds < PADDED_BY_ANY_HOST_SECONDS else 0.0)
        for number, one in zip(padded, found, strict=True)
        if (more := one.seconds * ops[number].count - ops[number].seconds) > 0
    }


def with_expected_seconds(ops: Sequence[TimedOp], found: Mapping[int, UnsurePad]) -> list[TimedOp]:
    """Returns the operations with the mean of their seconds over what is padded and what is left."""
    changed = list(ops)
    for number, pad in found.items():
        changed[number] = replace(ops[number], seconds=ops[number].seconds + pad.more_seconds * pad.chance_left)
    return changed
