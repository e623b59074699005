"""Models how the power limit lowers the clock of a step that would draw more, and how much longer its kernels take.

Kernels are measured with pauses between them, in isolation and in profiled steps alike, and so at the clock that each
reaches by itself: on an H200 products run at 1,640 to 1,860 of 1,980 MHz, attention at 1,730 to 1,840, all else close
to 1,980, by a limit that acts within a kernel and leaves no mark in what NVML says. Back-to-back steps draw

    static + (energy of products and attention + energy of bytes moved) / seconds of the step

and where that is above the limit, all clocks are held below one until it is not. A kernel whose own clock is above that
one takes longer in proportion, as far as it goes by the clock: products and attention wholly, what inductor generates
by the share of its instructions, copies not at all. The energy per FLOP goes with a power e of the clock, that per byte
is constant. With c the clock that is held, s, j and o a kernel's seconds, joules and clock by itself, T the seconds of
the step if nothing held it, B the energy of its bytes:

    static + (sum of j min(1, c / o)^e + B) / (T + sum of s (max(1, o / c) - 1)) = limit

Clocks and e are those of `power.CLOCKS_OF`, for compiled steps, by which they were chosen. In eager ones, and on a GPU
where nobody measured them, products and attention run at one clock and alone go by it, with e = 1: by the other clocks
eager steps with our attention come out up to 6.1% long, by these 3.9%, and all others as they do by both.

The mean over a whole step counts: on an H200 ten products of 1.4 ms run at 790 TFLOP/s and draw 900 W, and only after
tens of milliseconds of them does the clock begin to fall, to 664 TFLOP/s at 690 W.

The energy per FLOP of products follows, for each dtype, from the rates that large ones reach in bursts and sustain at
the limit; that per byte is `power.BYTE_JOULES`, or the GPU's own. Convolutions and grouped products, whose FLOPs are
not counted, draw no matrix energy here.

Cards differ: of seven H200s steps at the limit took from 2.4% less than this to 2.5% more, those of one card 1.1% of
each other (standard deviation). What a card sustains is in its own profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

from flopcast.kernels.shapes import DTYPE_BYTES, Attention, Call, Gemm
from flopcast.roofline.gpu.catalogue.power import (
    BYTE_JOULES,
    BYTE_JOULES_OF,
    CLOCKS_OF,
    OF_PRODUCTS,
    STATIC_SHARE,
    Clocks,
)  # fmt: skip
from flopcast.roofline.gpu.library.generated import share_of_instructions
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.stream.compiled.generated_kernel import kernel_of_call

# Error of the modelled power: standard deviation of its logarithm.
SIGMA = 0.05
# The sustained rate's share of the burst rate for products projected from an H200's bursts by the ratio of the two
# parts' sustained rates (`gpu/projection/project.py`): the H200's own share.
PROJECTED_SHARE = 0.835
# The lowest clock the model gives, of that of products: bytes that never leave the cache draw less than they are
# charged with, which would all but stop a few products among many such bytes. By the law, a part of half an H200's
# power holds a share of 0.6 under products.
LEAST_CLOCK = 0.5
# On a device that has rested the clock begins to fall after the first of these, and falls no more after the second:
# products and attention in turn, whose clock was read every few milliseconds.
FALL_SECONDS = (0.02, 0.1)
SIDE = 8192  # rows and columns of the square products by which burst and sustained rates are measured
_HALVINGS = 24  # of the range in which the clock lies, to within 1e-7
_PRODUCTS = (Gemm, Attention)  # a tuple, which is looked at in a third of the time of a union


@dataclass(frozen=True)
class Power:
    """Back-to-back steps' mean power, the seconds that the limit adds to each, and the clock at which it holds the
    multiprocessors, as a share of the highest; 1 where it holds none."""

    watts: float
    seconds: float
    clock_share: float


class Load(NamedTuple):
    """Kernels that reach the same clock `own` by themselves, of that of large products: their energy in joules, and
    those of their seconds that go by the clock."""

    own: float
    joules: float
    seconds: float


@dataclass(frozen=True)
class Draw:
    """A step's energy if nothing holds its clock: that of bytes moved, whatever the clock, and that of `loads`; with
    the part's power limit, static power and clocks."""

    limit_watts: float
    static_watts: float
    byte_joules: float
    loads: tuple[Load, ...] = ()
    clocks: Clocks = OF_PRODUCTS

    @property
    def matrix_joules(self) -> float:
        return sum(load.joules for load in self.loads)

    def watts(self, seconds: float, clock: float | None = None) -> float:
        """Returns the mean power of back-to-back steps that take `seconds` each if nothing holds their clock; held at
        `clock`, of that of large products, where it is given."""
        held = self.clocks.highest if clock is None else clock
        exponent = self.clocks.energy_exponent
        joules = sum(load.joules * min(held / load.own, 1.0) ** exponent for load in self.loads) + self.byte_joules
        return float(self.static_watts + joules / (seconds + self.slowed(held)))

    def slowed(self, clock: float) -> float:
        """Returns the seconds that a step takes longer where its clock is held at `clock`."""
        return sum(load.seconds * (load.own / clock - 1.0) for load in self.loads if load.own > clock)

    def clock(self, seconds: float) -> float:
        """Returns the clock, of that of large products, at which the limit holds a step that takes `seconds` if nothing
        holds it: the highest where it draws less."""
        low, high = LEAST_CLOCK, self.clocks.highest
        if not self.loads or self.watts(seconds) <= self.limit_watts:
            return high
        if self.watts(seconds, low) >= self.limit_watts:
            return low
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.watts(seconds, middle) > self.limit_watts else (middle, high)
        return low

    def added_seconds(self, seconds: float) -> float:
        """Returns the seconds that the limit adds to a step that takes `seconds` if nothing holds its clock."""
        return self.slowed(self.clock(seconds))

    def times(self, factor: float) -> Draw:
        """Returns the draw if all work took `factor` times the energy."""
        loads = tuple(load._replace(joules=load.joules * factor) for load in self.loads)
        return replace(self, byte_joules=self.byte_joules * factor, loads=loads)

    def power(self, seconds: float) -> Power:
        """Returns the power of back-to-back steps that take `seconds` if nothing holds their clock."""
        if self is NONE or not seconds:
            return Power(0.0, 0.0, 1.0)
        clock = self.clock(seconds)
        return Power(self.watts(seconds, clock), self.slowed(clock), clock / self.clocks.highest)


NONE = Draw(limit_watts=1.0, static_watts=0.0, byte_joules=0.0)


def draw_of(ops: Sequence[TimedOp], profile: Profile) -> Draw:
    """Returns what a step of these operations draws; `NONE`, which no limit affects, where the part's limit or the
    energies are not known, and where the profile's products are already timed at the limited clock (`gpu/laws/`, for
    older parts)."""
    clocks = clocks_of(ops, profile)
    if not energies(profile, clocks):
        return NONE
    limit = float(profile.device["power_limit_w"] or 0.0)
    joules: dict[float, float] = {}  # by the clock that kernels reach by themselves
    seconds: dict[float, float] = {}
    for own, more_joules, more_seconds in loads_of(ops, profile, clocks):
        joules[own] = joules.get(own, 0.0) + more_joules
        seconds[own] = seconds.get(own, 0.0) + more_seconds
    moved = sum(op.bytes for op in ops if op.work is not None)
    loads = tuple(Load(own, joules[own], seconds[own]) for own in joules if seconds[own])
    return Draw(limit, STATIC_SHARE * limit, moved * byte_joules(profile), loads, clocks)


def loads_of(ops: Sequence[TimedOp], profile: Profile, known_clocks: Clocks | None = None) -> list[Load]:
    """Returns what each operation's kernels put on the part. `known_clocks`: what `clocks_of` returns, where it is
    known."""
    clocks = clocks_of(ops, profile) if known_clocks is None else known_clocks
    flop_joules = energies(profile, clocks)
    watts = {dtype: _watts_of_products(dtype, profile, flop_joules) for dtype in flop_joules}
    none = Load(clocks.highest, 0.0, 0.0)
    known: dict[int, float] = {}  # by work, which live as long as ops
    found = []
    for op in ops:
        shape = None if op.work is None else op.work.shape
        load = none
        if isinstance(shape, _PRODUCTS):
            joules = op.flops * flop_joules.get(shape.dtype, 0.0)
            most = watts.get(shape.dtype, 0.0) * op.seconds
            if isinstance(shape, Gemm) or clocks.attention is None:
                own = min(max(sqrt(most / joules), 1.0), clocks.highest) if joules else clocks.highest
                load = Load(round(own, 2), joules, op.seconds)
            else:
                own, share = clocks.attention[shape.direction]
                load = Load(own, share * most, op.seconds)
        elif clocks.slows_generated and op.work is not None and op.work.op_class == "generated":
            if id(op.work) not in known and isinstance(shape, Call):
                known[id(op.work)] = share_of_instructions(kernel_of_call(shape), profile)
            load = Load(clocks.highest, 0.0, known.get(id(op.work), 0.0) * op.seconds)
        found.append(load)
    return found


def clocks_of(ops: Sequence[TimedOp], profile: Profile) -> Clocks:
    """Returns those of a compiled step, which has generated kernels, or of an eager one."""
    is_compiled = any(op.work is not None and op.work.op_class == "generated" for op in ops)
    return CLOCKS_OF.get(profile.gpu, OF_PRODUCTS) if is_compiled else OF_PRODUCTS


def _watts_of_products(dtype: str, profile: Profile, flop_joules: Mapping[str, float]) -> float:
    """Returns the power of large products at the clock that they reach by themselves, beyond the static."""
    return flop_joules.get(dtype, 0.0) * profile.ceiling(f"matrix_burst/{dtype}", 0.0)


def seconds_after_rest(ops: Sequence[TimedOp], profile: Profile, clock: float) -> list[float]:
    """Returns the device seconds of each operation in a single step that begins on a rested device, as a profiler reads
    them, where the limit holds the clock of steps in a row at `clock`, of that of large products: the longer the step,
    the larger the part of it in which the clock has fallen (FALL_SECONDS)."""
    total = sum(op.seconds for op in ops if op.collective is None)
    first, last = FALL_SECONDS
    falling = min(max(total - first, 0.0), last - first)
    fallen = max(total - last, 0.0)
    share = (falling * falling / (2.0 * (last - first)) + fallen) / total if total else 0.0
    pairs = zip(ops, loads_of(ops, profile), strict=True) if share else ((op, Load(0.0, 0.0, 0.0)) for op in ops)
    return [op.seconds + share * load.seconds * max(load.own / clock - 1.0, 0.0) for op, load in pairs]


def byte_joules(profile: Profile) -> float:
    """Returns joules per byte moved: of a projection those that no step of its GPU has told."""
    return BYTE_JOULES_OF.get(profile.gpu, BYTE_JOULES) if profile.basis == "measured" else BYTE_JOULES


def energies(profile: Profile, clocks: Clocks = OF_PRODUCTS) -> Mapping[str, float]:
    """Returns joules per FLOP at a product's own clock, by dtype; {} where they cannot be derived.

    At the limit, large products sustain a share c of their burst rate, and so of their own clock: the power that the
    limit leaves after static power and bytes moved is c^e x energy per FLOP x sustained rate."""
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
            at_limit = max(watts / sustained.value - moved * byte_joules(profile), 0.0)
            found[dtype] = at_limit / share**clocks.energy_exponent
    return found
