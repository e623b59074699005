"""What a step's power does to its clock: one that draws more than the limit runs its products slower. Plain arithmetic.

Kernels are measured, and profiled in steps, with pauses between: at the highest clock. Steps one after the other draw

    static + (energy of products + energy of bytes moved) / seconds of the step

and where that is above the limit, the clock falls until it is not. Products and attention take longer in proportion;
what waits for memory does not. Energy a FLOP goes with the clock (`power.py` says why), that of a byte does not. With
c the clock's share of the highest, T the step at full clock, M its matrix kernels, E and B the energies there:

    static + (c E + B) / (T - M + M / c) = limit

The mean over a whole step counts: on an H200 ten products of 1.4 ms run at 790 TFLOP/s on 900 W, and only seconds of
them fall to 664, at 690 W.

Energies of a FLOP are told by the rates that large products reach in bursts and sustain at the limit, dtype by dtype;
that of a byte is `power.BYTE_JOULES`. Convolutions and grouped products, whose FLOPs are not counted, draw nothing
here. On an H200 this gives the power of seven steps of group "intervals", 273 to 680 W as read, within 4%, and the time
of products with one, two and four copies of 2 GiB after each, without a pause, 1.6 to 2.4% high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from flopcast.kernels.shapes import DTYPE_BYTES, Attention, Gemm
from flopcast.roofline.gpu.catalogue.power import BYTE_JOULES, STATIC_SHARE
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp

# By how much the power that is worked out may be off, standard deviation of its logarithm.
SIGMA = 0.05
# Of products that are projected from an H200's bursts by the ratio of what both sustain (`project.py`): the H200's own.
PROJECTED_SHARE = 0.835
# No clock is told below this share: bytes that never leave the cache draw less than they are counted with, and a few
# products among many of those would stand still. By the law a part of half an H200's power holds 0.6 under products.
LEAST_CLOCK = 0.5
SIDE = 8192  # of the square products that bursts and sustained rates are measured with


@dataclass(frozen=True)
class Power:
    """Of steps one after the other: their mean power, what the limit adds to each, and the clock of the highest."""

    watts: float
    seconds: float
    clock_share: float


@dataclass(frozen=True)
class Draw:
    """What a step draws at full clock: joules of its matrix kernels and of its bytes, and how long the former run."""

    limit_watts: float
    static_watts: float
    matrix_joules: float
    byte_joules: float
    matrix_seconds: float

    def watts(self, seconds: float) -> float:
        """Mean power of steps of so many seconds, one after the other, were there no limit."""
        return self.static_watts + (self.matrix_joules + self.byte_joules) / seconds

    def clock(self, seconds: float) -> float:
        """The share of the highest clock that the limit leaves a step that takes `seconds` at full clock; at most 1."""
        left = self.limit_watts - self.static_watts
        if self.matrix_joules + self.byte_joules <= left * seconds or not self.matrix_seconds:
            return 1.0
        # E c^2 + (B - left (T - M)) c - left M = 0
        linear = self.byte_joules - left * max(seconds - self.matrix_seconds, 0.0)
        root = sqrt(linear**2 + 4.0 * self.matrix_joules * left * self.matrix_seconds)
        return min(max((root - linear) / (2.0 * self.matrix_joules), LEAST_CLOCK), 1.0)

    def added_seconds(self, seconds: float) -> float:
        """What the limit adds to a step that takes `seconds` at full clock."""
        return self.matrix_seconds * (1.0 / self.clock(seconds) - 1.0)

    def times(self, factor: float) -> Draw:
        """As if all work took so many times the energy."""
        return replace(self, matrix_joules=self.matrix_joules * factor, byte_joules=self.byte_joules * factor)

    def power(self, step_seconds: float) -> Power:
        """Of steps one after the other that take `step_seconds` with what the limit adds."""
        if self is NONE or not step_seconds:
            return Power(0.0, 0.0, 1.0)
        left = (self.limit_watts - self.static_watts) * step_seconds - self.byte_joules
        clock = min(max(left / self.matrix_joules, LEAST_CLOCK), 1.0) if self.matrix_joules else 1.0
        joules = self.matrix_joules * clock + self.byte_joules
        return Power(self.static_watts + joules / step_seconds, self.matrix_seconds * (1.0 / clock - 1.0), clock)


NONE = Draw(limit_watts=1.0, static_watts=0.0, matrix_joules=0.0, byte_joules=0.0, matrix_seconds=0.0)


def draw_of(ops: Sequence[TimedOp], profile: Profile) -> Draw:
    """What a step of these operations draws. `NONE`, which no limit touches, where the part's limit or the energies are
    not known, and where the profile's products are at the limited clock already (`gpu/laws/`, of older parts)."""
    flop_joules = energies(profile)
    if not flop_joules:
        return NONE
    limit = float(profile.device["power_limit_w"] or 0.0)
    matrix = seconds = moved = 0.0
    for op in ops:
        if op.work is not None:
            moved += op.bytes
            shape = op.work.shape
            if isinstance(shape, Gemm | Attention):
                matrix += op.flops * flop_joules.get(shape.dtype, 0.0)
                seconds += op.seconds
    return Draw(limit, STATIC_SHARE * limit, matrix, moved * BYTE_JOULES, seconds)


def energies(profile: Profile) -> Mapping[str, float]:
    """Joules a FLOP at full clock, by dtype; {} where they cannot be told.

    At the limit large products run at a share c of their bursts' rate, and so of the clock: what the limit leaves
    beside their bytes is c energy rate."""
    limit = float(profile.device.get("power_limit_w") or 0.0)
    if not limit or any(surface.kind == "tiles" for surface in profile.surfaces.values()):
        return {}
    found = {}
    for name, sustained in profile.ceilings.items():
        kind, _, dtype = name.partition("/")
        burst = profile.ceiling(f"matrix_burst/{dtype}", 0.0)
        if kind == "matrix_sustained" and burst > 0.0 and sustained.value > 0.0:
            share = min(sustained.value / burst, 1.0) if profile.basis == "measured" else PROJECTED_SHARE
            watts = (1.0 - STATIC_SHARE) * limit
            moved = 3.0 * DTYPE_BYTES.get(dtype, 1) / (2.0 * SIDE)  # bytes a FLOP
            found[dtype] = max(watts / sustained.value - moved * BYTE_JOULES, 0.0) / share
    return found
