"""Estimates a kernel's time by its bytes and FLOPs alone, where nothing similar was measured: its passes over its
tensors at copy bandwidth, its FLOPs at the rate that products of its dtype sustain.

Normalisations, convolutions and the fused kernels are unlike the relatives of their class (sums) or have none, so what
torch's, cuDNN's and Triton's kernels move is written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from flopcast.roofline.gpu.profile.request import WorkLike
from flopcast.roofline.stream.lowering.fused import FUSED_LAUNCHES, FUSED_PASSES, OWN_OPTIMIZER
from flopcast.roofline.stream.lowering.variants import CallVariant, ConvVariant, Variant

# Where nothing was measured: a kernel of 2 us, 1 TB/s, 100 TFLOP/s.
DEFAULT_FLOOR, DEFAULT_BANDWIDTH, DEFAULT_PEAK = 2e-6, 1e12, 1e14
DEFAULT_EFFICIENCY = 0.5

# What torch's kernels move, over what they would if each tensor were read or written once, and how many they are
# (2.11, layer_norm_kernel.cu and Normalization.cuh). Forward: x for the statistics and again for the result (3 passes,
# not 2). Backward: x and its gradient for the sums and again for the result, and in layer norm once more for the
# weights' gradients (5 and 7, not 3).
NORM_PASSES = {
    "native_layer_norm": (3 / 2, 1), "native_layer_norm_backward": (7 / 3, 2),
    "native_group_norm": (3 / 2, 2), "native_group_norm_backward": (7 / 3, 3),
    "native_batch_norm": (3 / 2, 3), "native_batch_norm_backward": (5 / 3, 1),
}  # fmt: skip
# Batch norm's sums: a block of 512 threads per channel, which waits for each of its loads and divides. 600 cycles per
# round is an assumption of the right size for a load that misses L2, not a measurement.
CHANNEL_THREADS, LOAD_CYCLES, SM_THREADS = 512, 600, 2048
DEFAULT_CLOCK_MHZ, DEFAULT_SM_COUNT = 1700, 132
# cuDNN's 16-bit kernels require channels last: otherwise every tensor is converted, one more read and write each.
CONV_PASSES = {"nchw": 3, "nhwc": 1}


@dataclass(frozen=True)
class Rates:
    """The rates that a device reaches. `peaks`: dense FLOP/s by dtype; `ceilings`: what was measured on it."""

    peaks: Mapping[str, float]
    ceilings: Mapping[str, float]
    clock_mhz: float = DEFAULT_CLOCK_MHZ
    sm_count: int = DEFAULT_SM_COUNT

    @property
    def floor(self) -> float:
        """Seconds of the shortest kernel."""
        return self.ceilings.get("kernel_floor", DEFAULT_FLOOR)

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a copy moves."""
        return self.ceilings.get("hbm_copy", DEFAULT_BANDWIDTH)

    def half_peak(self, dtype: str) -> float:
        """FLOP/s that products may be expected to reach."""
        return (self.peaks.get(dtype) or self.peaks.get("bf16") or DEFAULT_PEAK) * DEFAULT_EFFICIENCY

    def matrix_rate(self, dtype: str) -> float:
        """FLOP/s that products sustain: measured, else half the peak."""
        return self.ceilings.get(f"matrix_sustained/{dtype}") or self.half_peak(dtype)


def norm_seconds(rates: Rates, variant: Variant, work: WorkLike) -> float:
    """Seconds of the passes at copy bandwidth; batch norm's sums no faster than a channel's block loads."""
    assert isinstance(variant, CallVariant), variant
    passes, kernels = NORM_PASSES[variant.operation]
    seconds = work.bytes * passes / rates.bandwidth
    if "batch_norm" in variant.operation and variant.pattern.startswith("mix"):
        count, channels = (round(2**size) for size in work.features[1:3])
        waves = ceil(channels * CHANNEL_THREADS / (SM_THREADS * rates.sm_count))
        loop = waves * count / CHANNEL_THREADS * LOAD_CYCLES / (rates.clock_mhz * 1e6)
        is_backward = variant.operation.endswith("_backward")  # in one kernel; the forward's result has one of its own
        seconds = max(seconds, 2 * loop if is_backward else loop + work.bytes / rates.bandwidth)
    return kernels * rates.floor + seconds


def fused_seconds(rates: Rates, variant: Variant, work: WorkLike) -> float:
    """Seconds of the kernels' floors, and of the bytes at copy bandwidth as often as they are moved."""
    operation = variant.tokens[0]
    seconds = work.bytes / rates.bandwidth * FUSED_PASSES.get(operation, 1.0)
    return FUSED_LAUNCHES.get(operation, 1) * rates.floor + seconds


def convolution_seconds(rates: Rates, variant: Variant, work: WorkLike) -> float:
    """Seconds of the FLOPs at the rate that products of the dtype sustain, and of converting the tensors' layout."""
    assert isinstance(variant, ConvVariant), variant
    passes = CONV_PASSES.get(variant.layout, 1) if variant.dtype in ("bf16", "fp16") else 1
    moving = work.bytes * (passes - 1) / rates.bandwidth  # kernels of their own, before and after the products
    computing = max(work.flops / rates.matrix_rate(variant.dtype), work.bytes / rates.bandwidth)
    return passes * rates.floor + moving + computing


def plain_seconds(rates: Rates, variant: Variant, work: WorkLike) -> float:
    """Seconds of the bytes at copy bandwidth or of the FLOPs at half the peak, whichever take longer."""
    seconds = rates.floor + work.bytes / rates.bandwidth
    return max(seconds, rates.floor + work.flops / rates.half_peak(variant.dtypes)) if work.flops else seconds


# By operation, else by class: what such kernels take where none of theirs was measured, and how that came about.
COSTS: dict[str, tuple[Callable[[Rates, Variant, WorkLike], float], str]] = {
    **dict.fromkeys(NORM_PASSES, (norm_seconds, "passes over its tensors")),
    **dict.fromkeys(("fused", *OWN_OPTIMIZER), (fused_seconds, "passes over its tensors")),
    "conv": (convolution_seconds, "FLOPs and passes over its tensors"),
}
