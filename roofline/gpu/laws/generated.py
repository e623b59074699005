"""The law of kernels that inductor generates: pointwise, reductions of all kinds, scatter.

A launch takes a floor, the time until memory is at its rate, what one thread waits for loads one after another, for
loads by what others have loaded and for the other threads of its program, and then the longer of two times:

- of its bytes. Those that still lie in the L2 come from there: of `b` bytes that were touched `a` bytes ago a share
  1 / (1 + ((a + b) / L2)^3), and as much of what it writes as fits;
- of its instructions, over the rate of all SMs: arithmetic, sines and cosines, which take many, loads and stores,
  those whose neighbours lie in other lines more. The special function unit has its own rate, and is hidden mostly.

Looped reductions along rows have a program per row: of few rows the last ones leave SMs idle. Sums over rows within
the kernel take rows in turn, each with a wait that nothing hides.

Latencies are taken as they are on any GPU; the rest scales with `Rates`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from flopcast.bounds import NonNegative, Positive
from flopcast.roofline.stream.compiled.generated_kernel import GeneratedKernel
from flopcast.roofline.stream.compiled.launches import Kind

LEAVING = 3.0  # exponent by which operands leave the L2
SPECIAL_PER_CLOCK = 16.0  # results of an SM's special function units, sm_70 to sm_100
WORD = 4.0  # bytes
ROWS_ALONE = (Kind.LOOPED, Kind.SPLIT)  # if along rows: a program per row


class Rates(NamedTuple):
    """What of a GPU's datasheet its generated kernels go by."""

    bandwidth: float  # bytes per second
    sm_count: int
    clock: float  # SM clocks per second
    l2_bytes: float


@dataclass(frozen=True, kw_only=True)
class GeneratedLaw:
    """Parameters. Seconds: `floor` of any launch, `load` of one that loads, `ramp` until memory is at its rate, of
    `ramp_bytes` half; `step` of a load after others, `chain` of one by what was loaded, `reduction` of a wait for other
    threads, `turn` of a row after another. Shares of the datasheet's bandwidth: `read`, `written`; of its L2:
    `resident`. Per clock and SM: `cached` bytes from the L2. Clocks of an SM: of an instruction (`arithmetic`), a sine
    (`trigonometric`), a load or store, whatever its width (`access`), four bytes of it (`request`), one element whose
    neighbours lie elsewhere besides (`gather`). `tail`: what the last rows cost, of the time of as many rows as there
    are SMs. `overlap`: exponent of the smooth maximum."""

    floor: NonNegative
    load: NonNegative
    ramp: NonNegative
    ramp_bytes: Positive
    step: NonNegative
    chain: NonNegative
    reduction: NonNegative
    turn: NonNegative
    read: Positive
    written: Positive
    cached: Positive
    resident: Positive
    arithmetic: NonNegative
    trigonometric: NonNegative
    access: NonNegative
    request: NonNegative
    gather: NonNegative
    tail: NonNegative
    overlap: Positive


class Parts(NamedTuple):
    """The times that the law is made of, in seconds."""

    fixed: float
    memory: float
    instructions: float
    waiting: float


def seconds(kernel: GeneratedKernel, rates: Rates, law: GeneratedLaw) -> float:
    found = parts(kernel, rates, law)
    most = max(found.memory, found.instructions)
    if not most:
        return found.fixed + found.waiting
    shares = (found.memory / most, found.instructions / most)
    longest = most * sum(share**law.overlap for share in shares) ** (1.0 / law.overlap)
    return float(found.fixed + found.waiting + longest)


def instruction_share(kernel: GeneratedKernel, rates: Rates, law: GeneratedLaw) -> float:
    """Returns the share of the time that is its instructions': by what part of a kernel a lower clock lengthens it. Of
    kernels on an H200 that large products in turn with them held at 0.7 to 0.85 of their clock it was 0.5 to 0.9 of
    losses, 0.5 of GELU, 0.15 of RMSNorm, 0 of SwiGLU (`python -m studies.power.kernels`)."""
    found = parts(kernel, rates, law)
    if not found.instructions:
        return 0.0
    ratio = found.memory / found.instructions
    both = 1.0 + float(ratio**law.overlap)
    longest = float(both ** (1.0 / law.overlap)) * found.instructions
    return longest / both / (found.fixed + found.waiting + longest)


def parts(kernel: GeneratedKernel, rates: Rates, law: GeneratedLaw) -> Parts:
    work = kernel.work
    l2_bytes = law.resident * rates.l2_bytes
    warm = min(sum(size * _stays(age + size, l2_bytes) for size, age in kernel.ages), kernel.bytes_read)
    absorbed = kernel.bytes_written * _stays(kernel.bytes, l2_bytes)
    cold, clocks = kernel.bytes_read - warm, rates.sm_count * rates.clock
    memory = (
        cold / (law.read * rates.bandwidth)
        + (warm + absorbed) / (law.cached * clocks)
        + (kernel.bytes_written - absorbed) / (law.written * rates.bandwidth)
    )
    issued = (
        law.arithmetic * work.arithmetic
        + law.trigonometric * work.trigonometric
        + law.access * work.accesses
        + law.request * work.requested / WORD
        + law.gather * work.gathered
    )
    instructions = max(issued, work.special / SPECIAL_PER_CLOCK) / clocks
    waiting = law.step * work.steps + law.chain * work.chained + law.reduction * work.reductions
    idle = 1.0
    if kernel.kind in ROWS_ALONE and kernel.hint == "INNER":
        rows = prod(size for name, size in kernel.numels if not name.startswith("r"))
        idle += law.tail * min(rates.sm_count / max(rows, 1), 1.0)
    fixed = law.floor + law.turn * work.turns + (law.load if work.steps else 0.0)
    if cold:
        fixed += law.ramp * cold / (cold + law.ramp_bytes)
    return Parts(fixed, memory * idle, instructions * idle, waiting)


def _stays(distance: float, l2_bytes: float) -> float:
    """The share that is still in the L2 when so many bytes have been touched since, its own included."""
    return float(1.0 / (1.0 + (distance / l2_bytes) ** LEAVING))
