"""The law of kernels that inductor generates: pointwise, reductions of all kinds, scatter.

A launch takes a floor, the time until memory is at its rate, what one thread waits for loads one after another, for
loads by what others have loaded and for the other threads of its program, and then the longest of three times:

- of its bytes. Those that still lie in the L2 come from there: of `b` bytes that were touched `a` bytes ago a share
  1 / (1 + ((a + b) / L2)^3), and as much of what it writes as fits. Memory that reads in between is slower to write;
- of its instructions, over the rate of all SMs: arithmetic, sines and cosines, which take many, loads and stores,
  those whose neighbours lie in other lines more. The special function unit has its own rate, and is hidden mostly;
- of its programs (thread blocks), which the GPU begins one after another: a pointwise one has 1,024 elements, so that
  those that fill a tensor in bf16, or repeat what they read, are begun more slowly than memory could take what they
  write.

Looped reductions along rows have a program per row: of few rows the last ones leave SMs idle. Sums over rows within
the kernel take rows in turn, each with a wait that nothing hides.

Latencies are taken as they are on any GPU; the rest scales with `Rates`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from flopcast.bounds import NonNegative, Positive
from flopcast.roofline.stream.compiled.generated_kernel import GeneratedKernel
from flopcast.roofline.stream.compiled.launches import Kind

LEAVING = 3.0  # exponent by which operands leave the L2
SPECIAL_PER_CLOCK = 16.0  # results of an SM's special function units, sm_70 to sm_100
WORD = 4.0  # bytes
ROWS_ALONE = (Kind.LOOPED, Kind.SPLIT)  # if along rows: a program per row
TURNS_FROM = 0.25  # bytes read for one written from which on memory turns from one to the other all the time

# Elements of a program, as inductor's heuristics choose them (torch/_inductor/runtime/triton_heuristics.py): of a
# pointwise kernel with many, or few; rows of a persistent reduction; columns of a reduction down them.
POINTWISE_MOST, POINTWISE_LEAST, POINTWISE_PROGRAMS = 1024, 256, 128
ROWS_MOST, COLUMNS = 8, 64


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
    `resident`. `turned`: time of a byte that is written while others are read, besides, over that of one at the
    datasheet's bandwidth. Per clock and SM: `cached` bytes from the L2. Clocks of an SM: of an instruction
    (`arithmetic`), a sine (`trigonometric`), a load or store, whatever its width (`access`), four bytes of it
    (`request`), one element whose neighbours lie elsewhere besides (`gather`). Clocks of the GPU: from one program's
    begin to the next's (`program`). `tail`: what the last rows cost, of the time of as many rows as there are SMs.
    Exponents of the smooth maximum: `overlap`, of kernels without reductions `overlap_pointwise`."""

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
    turned: NonNegative
    cached: Positive
    resident: Positive
    arithmetic: NonNegative
    trigonometric: NonNegative
    access: NonNegative
    request: NonNegative
    gather: NonNegative
    program: NonNegative
    tail: NonNegative
    overlap: Positive
    overlap_pointwise: Positive


class Parts(NamedTuple):
    """The times that the law is made of, in seconds."""

    fixed: float
    memory: float
    instructions: float
    programs: float
    waiting: float

    def longest(self, overlap: float) -> float:
        """The smooth maximum of those that pass side by side."""
        together = (self.memory, self.instructions, self.programs)
        most = max(together)
        return float(most * sum((part / most) ** overlap for part in together) ** (1.0 / overlap)) if most else 0.0


def seconds(kernel: GeneratedKernel, rates: Rates, law: GeneratedLaw) -> float:
    found = parts(kernel, rates, law)
    return found.fixed + found.waiting + found.longest(_overlap(kernel, law))


def instruction_share(kernel: GeneratedKernel, rates: Rates, law: GeneratedLaw) -> float:
    """Returns the share of the time that is its instructions': by what part of a kernel a lower clock lengthens it. Of
    kernels on an H200 that large products in turn with them held at 0.7 to 0.85 of their clock it was 0.5 to 0.9 of
    losses, 0.5 of GELU, 0.15 of RMSNorm, 0 of SwiGLU (`python -m studies.power.kernels`)."""
    found, overlap = parts(kernel, rates, law), _overlap(kernel, law)
    longest = found.longest(overlap)
    if not longest:
        return 0.0
    share = (found.instructions / longest) ** overlap  # the derivative of the logarithm of the smooth maximum
    return float(share * longest / (found.fixed + found.waiting + longest))


def _overlap(kernel: GeneratedKernel, law: GeneratedLaw) -> float:
    return law.overlap_pointwise if kernel.kind is Kind.POINTWISE else law.overlap


def parts(kernel: GeneratedKernel, rates: Rates, law: GeneratedLaw) -> Parts:
    work = kernel.work
    l2_bytes = law.resident * rates.l2_bytes
    warm = min(sum(size * _stays(age + size, l2_bytes) for size, age in kernel.ages), kernel.bytes_read)
    absorbed = kernel.bytes_written * _stays(kernel.bytes, l2_bytes)
    cold, clocks = kernel.bytes_read - warm, rates.sm_count * rates.clock
    written = kernel.bytes_written - absorbed
    turned = law.turned * min(written, cold / TURNS_FROM)
    memory = (
        (cold / law.read + written / law.written + turned) / rates.bandwidth
        + (warm + absorbed) / (law.cached * clocks)
    )  # fmt: skip
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
        rows, _ = _extents(kernel)
        idle += law.tail * min(rates.sm_count / max(rows, 1), 1.0)
    fixed = law.floor + law.turn * work.turns + (law.load if work.steps else 0.0)
    if cold:
        fixed += law.ramp * cold / (cold + law.ramp_bytes)
    began = law.program * programs(kernel) / rates.clock
    return Parts(fixed, memory * idle, instructions * idle, began, waiting)


def programs(kernel: GeneratedKernel) -> int:
    """Returns about how many programs (thread blocks) a launch has, by inductor's heuristics."""
    results, reduced = _extents(kernel)
    if not reduced:
        return ceil(results / min(max(results // POINTWISE_PROGRAMS, POINTWISE_LEAST), POINTWISE_MOST))
    if kernel.hint == "INNER":
        padded = 1 << (reduced - 1).bit_length()
        return ceil(results / min(max(POINTWISE_MOST // padded, 1), ROWS_MOST))
    return ceil(results / COLUMNS)


def _extents(kernel: GeneratedKernel) -> tuple[int, int]:
    """How many results a kernel has, and of how many elements each is the reduction: 0 where it is of none."""
    reduced = [size for name, size in kernel.numels if name.startswith("r")]
    return prod(size for name, size in kernel.numels if not name.startswith("r")), prod(reduced) if reduced else 0


def _stays(distance: float, l2_bytes: float) -> float:
    """The share that is still in the L2 when so many bytes have been touched since, its own included."""
    return float(1.0 / (1.0 + (distance / l2_bytes) ** LEAVING))
