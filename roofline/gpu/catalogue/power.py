"""Models the clock a GPU holds under its power limit, and the rate that large products sustain there.

Power = a static share of the limit + `ENERGY` x FLOP/s x clock: energy per FLOP grows with the square of the voltage,
and the voltage with the square root of the clock, over the range in which limits act. Solved for the clock f at which
N multiprocessors of w FLOP per clock, busy for a share u of their peak, draw the whole limit P:

    f = sqrt((1 - STATIC_SHARE) P / (ENERGY N w u)),  at most the highest clock

Laws use `throttle` = (f at u = 1 / highest clock)^2. The clock falls to sqrt(throttle / u) of the highest where u
exceeds it.

Fitted: the energies, to one published or measured rate per architecture (`ENERGY`); the static share, to the H200's
draw when idle at its full clock. Checked, not fitted (the model's value in brackets): H100 SXM 720 TFLOP/s at 10240
cubed (664), H100 PCIe 472 (436), A100 PCIe 80 GB 253 at its best shape (223), A100 PCIe 40 GB 212 (203), A40 122 (123),
A10G about 70 dense (70), RTX 3090 77 (71), RTX 4090 173 (154). Rows of `achieved.csv` (torch-performance-test-data,
ml-engineering, thonking.ai). The exponent was chosen by the pair H100 PCIe and SXM; the model predicts 196 for an L40S,
and the tables of its products, which the refined profile is fitted to, sustain 190 on one stack and 275 on another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec

STATIC_SHARE = 0.17  # an H200 at 1980 MHz draws 113 to 124 of its 700 W before the work begins

# Share of the peak FLOP per clock that large products reach while power does not limit them.
REACHED = {
    "Hopper": 0.738,  # H200, measured: 790 TFLOP/s in bursts at 1980 MHz
    "Ampere GA100": 0.946,  # A100, 8192 cubed of zeros, which draw little: 295 of 312
    "Ampere GA102": 0.946,  # as GA100: the same instructions
    "Ada": 0.946,  # the same; L20, which power does not limit, 114 of 119.5
    "Blackwell": 0.733,  # B200 1745 at its best shape, at 1965 MHz
}
# Chips whose rate with fp32 accumulation is halved (GeForce, A10G) saturate it: 77 TFLOP/s of 71 on an RTX 3090.
REACHED_HALVED = 1.0
HALVED_FLOPS_PER_CLOCK = 600  # an SM of 512 bf16 FLOP per clock is halved, one of 1024 or more is not

# Joules per FLOP and GHz in bf16; those of other matrix types follow from their peaks
# (an H200 sustains 0.81 to 0.84 of its bursts in each of bf16, fp16, tf32 and fp8, and 0.95 in fp32).
ENERGY = {
    "Hopper": 0.527e-12,  # H200, measured: 664 TFLOP/s sustained on 700 W
    "Ampere GA100": 1.052e-12,  # A100 SXM, 8192 cubed of randn: 257 TFLOP/s on 400 W
    "Ampere GA102": 1.333e-12,  # RTX A6000: 123 TFLOP/s on 300 W
    "Ada": 1.033e-12,  # L4, 10240 cubed: 57 TFLOP/s on 72 W
    "Blackwell": 0.353e-12,  # B200: 1696 TFLOP/s less the 15% that its attention loses when it throttles, on 1000 W
}
SUSTAINED_RANGE = 1.2  # 90% range: a factor either way, which covers each of the rates above

# Joules per byte that a kernel moves, each operand counted once: the draw of the six longest steps of group "intervals"
# on an H200 (50 to 110 ms, at 545 to 680 W) beyond the static share and their products, 1.14 to 1.30e-10. Copies
# without a pause give 1.14 (601 W at 4.24 TB/s), bf16 silu 1.59.
BYTE_JOULES = 1.2e-10
# Of those whose steps drew otherwise: HBM3 takes more than the H200's HBM3e. By 15 eager steps of one H100
# (`python -m studies.byte_energy`). Six of another, whose steps took no part, give 1.68.
BYTE_JOULES_OF = {"nvidia-h100-sxm": 1.59e-10}


@dataclass(frozen=True)
class Clocks:
    """The clocks that kernels reach by themselves, as shares of the one that large products do, and how the energy of
    the same work goes with the clock.

    `highest`: of what draws little. `attention`: by direction, the clock, and its power, beyond the static, of
    what large products draw; None where nobody measured it: then attention runs at the clock of
    products and takes a product's energy per FLOP. `energy_exponent`: the power of the clock with which
    energy goes. `slows_generated`: whether a lower clock lengthens the instructions of generated kernels."""

    highest: float
    attention: Mapping[str, tuple[float, float]] | None
    energy_exponent: float
    slows_generated: bool


# Where no kernel's clock was measured: the energy per FLOP is proportional to the clock, as the voltage's square is.
OF_PRODUCTS = Clocks(highest=1.0, attention=None, energy_exponent=1.0, slows_generated=False)
# An H200's large products run at 1,720 of 1,980 MHz in steps, and alone, on normally distributed numbers, at 1,640. The
# exponent and the powers are such that four compiled steps take as long as they did (`studies.power`); those of other
# steps and cards judge them.
CLOCKS_OF = {
    "nvidia-h200": Clocks(
        highest=1.15, attention={"fwd": (1.04, 0.85), "bwd": (1.04, 0.79)}, energy_exponent=0.5, slows_generated=True
    )
}

# Share of the datasheet's fp32 peak that torch.mm reaches on CUDA cores with TF32 off: dual issue is seldom full
# (H200 0.77, A100 0.98, RTX A6000 0.62, RTX 3090 0.70, L4 and L40S 0.51, RTX 4090 0.68, B200 0.83).
FP32_FRACTION = {"Hopper": 0.77, "Ampere GA100": 0.98, "Ampere GA102": 0.64, "Ada": 0.55, "Blackwell": 0.83}


def reached(spec: GpuSpec) -> float:
    """Share of the peak FLOP per clock that large bf16 products reach."""
    per_clock = spec.bf16_flops_per_second / (spec.sm_count * spec.boost_mhz * 1e6)
    return REACHED_HALVED if per_clock < HALVED_FLOPS_PER_CLOCK else REACHED[spec.arch]


def peak_at_max_clock(spec: GpuSpec, dtype: str) -> float | None:
    """FLOP/s of the matrix units (fp32: of the CUDA cores) at the highest clock; None for a dtype that the GPU lacks.

    The datasheet's fp32 peak is already at that clock."""
    peak = spec.peaks.get(dtype)
    if peak is None or dtype == "fp32":
        return peak
    return peak * spec.max_clock_mhz / spec.boost_mhz


def throttle(spec: GpuSpec, dtype: str = "bf16") -> float:
    """The busy share of the matrix units above which power lowers the clock; above 1, power never does."""
    if dtype == "fp32":
        return 2.0
    clock_ghz = spec.max_clock_mhz / 1e3
    peak = spec.bf16_flops_per_second * spec.max_clock_mhz / spec.boost_mhz
    return (1.0 - STATIC_SHARE) * spec.tdp_w / (ENERGY[spec.arch] * peak * clock_ghz)


def burst_rate(spec: GpuSpec, dtype: str = "bf16") -> float | None:
    """FLOP/s of large products at the highest clock; None for a dtype that the GPU lacks."""
    peak = peak_at_max_clock(spec, dtype)
    if peak is None:
        return None
    return peak * (FP32_FRACTION[spec.arch] if dtype == "fp32" else reached(spec))


def matrix_rate(dtype: str, spec: GpuSpec) -> float | None:
    """FLOP/s that large products sustain under the power limit; None for a dtype that the GPU lacks."""
    burst = burst_rate(spec, dtype)
    return None if burst is None else burst * sustained_clock(spec, reached(spec), dtype)


def sustained_clock(spec: GpuSpec, busy: float, dtype: str = "bf16") -> float:
    """The clock held at a busy share of the matrix units, as a share of the highest clock."""
    return min(1.0, sqrt(throttle(spec, dtype) / busy))


def sustained_fraction(spec: GpuSpec) -> Number:
    """The share of the dense bf16 peak that large products sustain under the power limit, with its range."""
    rate = matrix_rate("bf16", spec)
    assert rate is not None  # every GPU of the table has bf16
    value = rate / spec.bf16_flops_per_second
    watts = spec.tdp_w / (spec.bf16_flops_per_second / 1e12)
    clock = sustained_clock(spec, reached(spec)) * spec.max_clock_mhz
    source = f"power model: {spec.tdp_w:g} W, {watts:.3g} W per peak TFLOP/s, {spec.arch}, {clock:.0f} MHz"
    return Number(value, value / SUSTAINED_RANGE, value * SUSTAINED_RANGE, "extrapolated", source)
