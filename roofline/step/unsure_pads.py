"""What a compiled step's products would take longer, were those left as they are whose padding depends on timings.

Inductor pads a product whose rows tensor cores cannot read 16 bytes at a time where it finds that faster, by timing
both while it compiles. The forecast pads as a quick host does (`stream/tracer/compiler/padding.py`); which of the close
calls another run leaves is not known, so that the interval of the device's seconds reaches up to all of them. Below,
nothing changes: what is not padded here was not close.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.stream.lowering.describe import describe

_ALIGN = 8  # elements of 16 bits, to whose multiples sizes are padded


def seconds_left_unpadded(ops: Iterable[TimedOp], pads: Iterable[Sequence[int]], profile: Profile) -> float:
    """Returns how many seconds longer the kernels of `ops` would take with the products of `pads`, (m, k, n) each,
    as they are. The copies into paddings, which would be saved, are not taken off."""
    as_they_are = {tuple(-(-size // _ALIGN) * _ALIGN for size in pad): pad for pad in pads}
    if not as_they_are:
        return 0.0
    padded, asked = [], []
    for op in ops:
        shape = None if op.work is None else op.work.shape
        if isinstance(shape, Gemm) and (shape.m, shape.k, shape.n) in as_they_are:
            m, k, n = as_they_are[shape.m, shape.k, shape.n]
            padded.append(op)
            asked.append((describe(replace(shape, m=m, k=k, n=n)), "torch", "cold"))
    found = profile.estimate(asked)
    return sum(max(one.seconds * op.count - op.seconds, 0.0) for op, one in zip(padded, found, strict=True))
