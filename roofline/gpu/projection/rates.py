"""Computes ratios of two GPUs' rates and latencies from their datasheets, and the errors of projections by them."""

from __future__ import annotations

from collections.abc import Callable
from math import hypot, log
from statistics import NormalDist

from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec
from flopcast.roofline.gpu.catalogue.power import SUSTAINED_RANGE, matrix_rate

# Standard deviations of log seconds, added to those of the source's own surfaces. They alone are set by the
# published rows that reports/projection checks:
# gemm, attention: 90% intervals hold nine in ten rows on the GPU where they hold fewest, the L40S (0.23 and 0.20; on
#   an A100 0.17 and 0.11 would do).
# memory: element-wise calls of an L4 are 9% off, norms and softmax 30%; published copy kernels elsewhere reach 84 to
#   98% of the datasheet's bandwidth.
# hot: nothing to check it with, and what fits into one L2 does not fit into another.
SIGMA = {"gemm": 0.25, "attention": 0.21, "conv": 0.30, "memory": 0.15, "hot": 0.30}
# Between parts of the same chip (H200 and H100 SXM): so that 90% intervals hold nine in ten of the 5,839 kernels that
# were forecast for an H100 before one was measured (reports/projection/nvidia-h100-sxm; 0.07, 0.04, 0.09 and 0.10).
# Convolutions were not among them.
SAME_CHIP_SIGMA = {**SIGMA, "gemm": 0.07, "attention": 0.05, "memory": 0.10, "hot": 0.10}

# What a chip sustains at another power limit or clock than the one that was measured is known within a factor of
# `power.SUSTAINED_RANGE` either way, of what keeps its matrix units busy.
LIMIT_SIGMA = log(SUSTAINED_RANGE) / NormalDist().inv_cdf(0.95)

ROOF = 0.92  # of the datasheet's bandwidth, what streaming kernels reach at best: 84 to 98% published
SHARPNESS = 4.0  # exponent of the smooth minimum of memory's roof and the SMs' limit
# L2 read bandwidth per clock and SM at the datasheet's clock (gpu-benches): H200 9775 GB/s, A100 5437, L40 5262. GA102
# and Blackwell are guesses by kinship. The H100 PCIe's 7040 GB/s were passed over until an H100 SXM had been measured:
# its L2 reads 7.66 TB/s where an H200's reads 8.88 (16 MiB), the same share less.
L2_BYTES_PER_CLOCK = {"Hopper": 40.0, "Ampere GA100": 35.7, "Ada": 14.9, "Ampere GA102": 15.0, "Blackwell": 40.0}
L2_OF_H100 = 35.2  # 7040 GB/s / (114 SMs x 1.755 GHz)
L2_BY_GPU = {"nvidia-h100-sxm": L2_OF_H100, "nvidia-h100-pcie": L2_OF_H100}


def sigmas(source: GpuSpec, target: GpuSpec) -> dict[str, float]:
    """Standard deviations of log seconds, by kind of law, of a projection from `source` to `target`."""
    if (source.arch, source.sm_count) != (target.arch, target.sm_count):
        return dict(SIGMA)
    found = dict(SAME_CHIP_SIGMA)
    if (source.tdp_w, source.max_clock_mhz) != (target.tdp_w, target.max_clock_mhz):
        found |= {kind: hypot(found[kind], LIMIT_SIGMA) for kind in ("gemm", "attention", "conv")}
    return found


def memory_rate(rate: float, source: GpuSpec, target: GpuSpec) -> float:
    """bytes/s on `target` of a kernel that moves `rate` on `source`.

    rate = smooth minimum of memory's roof and of what the SMs can issue. Solved for the latter on the source,
    which is then scaled by SMs and clock. A kernel at the roof tells nothing of its SM limit: it is put at
    twice the roof, so such a kernel goes nearly with bandwidth.

    An H100, measured since, has the H200's SMs and 0.7 of its bandwidth: kernels from 50 us on are forecast -0.9%
    (element-wise) and -0.3% (casts) at the median, by bandwidth alone they would be 15 and 16% high; the optimizer
    (-6%) and softmax (-10%) lie between the two.
    """
    roof = ROOF * source.usable_bytes_per_second
    left = rate**-SHARPNESS - roof**-SHARPNESS
    issue = max(left, (2.0 * roof) ** -SHARPNESS) ** (-1.0 / SHARPNESS)
    there = issue * _sm_clocks(target) / _sm_clocks(source)
    target_roof = ROOF * target.usable_bytes_per_second
    return rate * _smooth_min(there, target_roof) / _smooth_min(issue, roof)


def _smooth_min(a: float, b: float) -> float:
    return float((a**-SHARPNESS + b**-SHARPNESS) ** (-1.0 / SHARPNESS))


def _sm_clocks(spec: GpuSpec) -> float:
    return spec.sm_count * spec.boost_mhz * 1e6


def l2_rate(spec: GpuSpec) -> float:
    """L2 read bandwidth of all SMs together, in bytes/s."""
    per_clock = L2_BY_GPU.get(spec.name, L2_BYTES_PER_CLOCK[spec.arch])
    return spec.sm_count * spec.boost_mhz * 1e6 * per_clock


def cycles(source: GpuSpec, target: GpuSpec) -> float:
    """The ratio of the target's to the source's time for the same number of clock cycles."""
    return source.max_clock_mhz / target.max_clock_mhz


def sustained_rate(spec: GpuSpec, dtype: str) -> float | None:
    """FLOP/s that large products sustain under the power limit, in the order of arguments of `power.burst_rate`."""
    return matrix_rate(dtype, spec)


def matrix_ratio(
    rate: Callable[[GpuSpec, str], float | None], dtype: str, source: GpuSpec, target: GpuSpec
) -> float | None:
    """The target's matrix rate (`power.burst_rate` or `sustained_rate`) over the source's; None where one lacks the
    dtype."""
    here, there = rate(source, dtype), rate(target, dtype)
    return None if here is None or there is None else there / here
