"""Models how the power limit lowers the clock of a step that would draw more, and how much longer its products take.

Kernels are measured with pauses between them, in isolation and in profiled steps alike, and so at the highest clock.
Back-to-back steps draw

    static + (energy of products + energy of bytes moved) / seconds of the step

and where that is above the limit, the clock falls until it is not. Products and attention take longer in proportion;
kernels bound by memory do not. The energy per FLOP is proportional to the clock (`gpu/catalogue/power.py` says why),
that per byte is constant. With c the clock as a share of the highest, T the seconds of the step at full clock, M those
of its matrix kernels, E and B the energies of FLOPs and bytes at full clock:

    static + (c E + B) / (T - M + M / c) = limit

The mean over a whole step counts: on an H200 ten products of 1.4 ms run at 790 TFLOP/s and draw 900 W, and only after
seconds of them does the rate fall to 664 TFLOP/s, at 690 W.

The energy per FLOP follows, for each dtype, from the rates that large products reach in bursts and sustain at the
limit; that per byte is `power.BYTE_JOULES`, or the GPU's own. Convolutions and grouped products, whose FLOPs are not
counted, draw no matrix energy here. On an H200 this gives the power of seven steps of group "intervals", measured at
273 to 680 W, within 4%, and a time 1.6 to 2.4% too high for products each followed, without a pause, by one, two or
four copies of 2 GiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from flopcast.kernels.shapes import DTYPE_BYTES, Attention, Gemm
from flopcast.roofline.gpu.catalogue.power import BYTE_JOULES, BYTE_JOULES_OF, STATIC_SHARE
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp

# Error of the modelled power: standard deviation of its logarithm.
SIGMA = 0.05
# The sustained rate's share of the burst rate for products projected from an H200's bursts by the ratio of the two
# parts' sustained rates (`gpu/projection/project.py`): the H200's own share.
PROJECTED_SHARE = 0.835
# The lowest clock share the model gives: bytes that never leave the cache draw less than they are charged with, which
# would all but stop a few products among many such bytes. By the law, a part of half an H200's power holds a share of
# 0.6 under products.
LEAST_CLOCK = 0.5
SIDE = 8192  # rows and columns of the square products by which burst and sustained rates are measured


@dataclass(frozen=True)
class Power:
    """Back-to-back steps' mean power, the seconds that the limit adds to each, and their share of the highest clock."""

    watts: float
    seconds: float
    clock_share: float


@dataclass(frozen=True)
class Draw:
    """A step's energy at full clock: joules of its matrix kernels and of its bytes moved, and the matrix kernels'
    seconds; with the part's power limit and static power."""

    limit_watts: float
    static_watts: float
    matrix_joules: float
    byte_joules: float
    matrix_seconds: float

    def watts(self, seconds: float) -> float:
        """Returns the mean power of back-to-back steps of `seconds` each if there were no limit."""
        return self.static_watts + (self.matrix_joules + self.byte_joules) / seconds

    def clock(self, seconds: float) -> float:
        """Returns the share of the highest clock, at most 1, to which the limit holds a step that takes `seconds` at
        full clock."""
        left = self.limit_watts - self.static_watts
        if self.matrix_joules + self.byte_joules <= left * seconds or not self.matrix_seconds:
            return 1.0
        # E c^2 + (B - left (T - M)) c - left M = 0
        linear = self.byte_joules - left * max(seconds - self.matrix_seconds, 0.0)
        root = sqrt(linear**2 + 4.0 * self.matrix_joules * left * self.matrix_seconds)
        return min(max((root - linear) / (2.0 * self.matrix_joules), LEAST_CLOCK), 1.0)

    def added_seconds(self, seconds: float) -> float:
        """Returns the seconds that the limit adds to a step that takes `seconds` at full clock."""
        return self.matrix_seconds * (1.0 / self.clock(seconds) - 1.0)

    def times(self, factor: float) -> Draw:
        """Returns the draw if all work took `factor` times the energy."""
        return replace(self, matrix_joules=self.matrix_joules * factor, byte_joules=self.byte_joules * factor)

    def power(self, step_seconds: float) -> Power:
        """Returns the power of back-to-back steps that take `step_seconds`, including what the limit adds."""
        if self is NONE or not step_seconds:
            return Power(0.0, 0.0, 1.0)
        left = (self.limit_watts - self.static_watts) * step_seconds - self.byte_joules
        clock = min(max(left / self.matrix_joules, LEAST_CLOCK), 1.0) if self.matrix_joules else 1.0
        joules = self.matrix_joules * clock + self.byte_joules
        return Power(self.static_watts + joules / step_seconds, self.matrix_seconds * (1.0 / clock - 1.0), clock)


NONE = Draw(limit_watts=1.0, static_watts=0.0, matrix_joules=0.0, byte_joules=0.0, matrix_seconds=0.0)


def draw_of(ops: Sequence[TimedOp], profile: Profile) -> Draw:
    """Returns what a step of these operations draws; `NONE`, which no limit affects, where the part's limit or the
    energies are not known, and where the profile's products are already timed at the limited clock (`gpu/laws/`, for
    older parts)."""
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
    return Draw(limit, STATIC_SHARE * limit, matrix, moved * byte_joules(profile), seconds)


def byte_joules(profile: Profile) -> float:
    """Returns joules per byte moved: of a projection those that no step of its GPU has told."""
    return BYTE_JOULES_OF.get(profile.gpu, BYTE_JOULES) if profile.basis == "measured" else BYTE_JOULES


def energies(profile: Profile) -> Mapping[str, float]:
    """Returns joules per FLOP at full clock, by dtype; {} where they cannot be derived.

    At the limit, large products sustain a share c of their burst rate, and so of the highest clock: the power that the
    limit leaves after static power and bytes moved is c x energy per FLOP x sustained rate."""
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
            moved = 3.0 * DTYPE_BYTES.get(dtype, 1) / (2.0 * SIDE)  # bytes per FLOP
            found[dtype] = max(watts / sustained.value - moved * byte_joules(profile), 0.0) / share
    return found
