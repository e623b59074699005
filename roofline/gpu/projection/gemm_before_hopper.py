"""Projects cuBLAS's matrix products onto a GPU before Hopper, from its datasheet and an H200's latencies.

The law is `laws/gemm_before_hopper.py`. The surface measured on a Hopper reflects tiles and kernels that older GPUs do
not have, so its shape is not kept: only latencies in clock cycles, the share of memory bandwidth that products reach,
and the cost of unaligned rows.

The source of each parameter: rates and sizes from the datasheet at its highest clock; `reach` so that 8192 cubed
runs at `power.reached`, a published rate; L2 bandwidth as published for the architecture; prologue, epilogue, split,
floor, `quantised` and the share of bandwidth from the source's surface; `sharpness` from its choice of kernels;
`absorbed` the prior of `fit.priors.gemm_prior`, a half.

Looking at the errors informed three choices, none of them a value: that the power limit acts through the busy share
and not on the largest products alone, that floors are counted in clock cycles, and that `absorbed` is the prior and
not the value of an H200, whose results were rotated too (L40S error 23% with the latter, 18% with the former).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import log2

import numpy as np

from flopcast.roofline.gpu.catalogue import power
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec
from flopcast.roofline.gpu.laws import gemm_before_hopper
from flopcast.roofline.gpu.laws.gemm import FAMILIES, TILE_PREFIX
from flopcast.roofline.gpu.laws.laws import LAWS
from flopcast.roofline.gpu.profile.gaussian_process import Residual
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.gpu.projection.rates import cycles, l2_rate
from flopcast.roofline.stream.lowering.variants import GemmVariant, SurfaceKey

SHARED_BYTES_PER_CLOCK = 128.0  # per SM, in every architecture since Volta
CUDA_CORE_SHARED = 4.0  # fp32 on CUDA cores keeps larger tiles in registers: shared memory does not bind
ABSORBED = 0.5
SHARPNESS = 12.0  # of a source whose choice of kernels was not learnt: an H200's is 10 to 14
LARGE = 8192  # of the square product that `reach` is set by
POINTS = 40  # kept in the surface, for figures only: they are values of the law
FAINT = 1e-3  # standard deviation of a negligible residual

BEFORE_HOPPER = (9, 0)


def applies(key: SurfaceKey, surface: Surface, source: GpuSpec, target: GpuSpec) -> bool:
    """Whether the surface is of cuBLAS's products and only the target is older than Hopper, with other kernels."""
    is_older = target.capability < BEFORE_HOPPER <= source.capability
    return is_older and surface.kind == "gemm" and key.backend == "torch"


def tile_surface(surface: Surface, dtype: str, source: GpuSpec, target: GpuSpec, sigma: float) -> Surface | None:
    """The target's surface, with standard deviation `sigma`; None when the target lacks the dtype."""
    found = tile_params(surface, dtype, source, target)
    return None if found is None else with_law(surface, found, sigma)


def with_law(surface: Surface, params: dict[str, float], sigma: float) -> Surface:
    """A surface of the tile law without a residual, at a sample of the shapes of `surface`."""
    every = slice(None, None, max(1, len(surface.seconds) // POINTS))
    features = np.array(surface.features[every], float)
    sizes = np.array(surface.bytes[every], float), np.array(surface.flops[every], float)
    return replace(
        surface,
        kind="tiles",
        params=params,
        features=surface.features[every],
        bytes=surface.bytes[every],
        flops=surface.flops[every],
        seconds=tuple(np.exp(LAWS["tiles"].log_seconds(surface.variant, params, features, *sizes)).tolist()),
        noise=(sigma,) * len(features),
        # the inputs of the law: the sizes and one more
        residual=Residual((3.0,) * (features.shape[1] + 1), FAINT, FAINT, (FAINT,)),
        own=(),
        launches=(),  # which products are divided on other chips, in two kernels, is not known
        has_base=False,
        base=None,
    )


def tile_params(surface: Surface, dtype: str, source: GpuSpec, target: GpuSpec) -> dict[str, float] | None:
    """Parameters of `laws/gemm_before_hopper.py` on the target; None when the target lacks the dtype."""
    peak = power.peak_at_max_clock(target, dtype)
    burst = power.burst_rate(target, dtype)
    if peak is None or burst is None:
        return None
    product = surface.variant
    assert isinstance(product, GemmVariant), product
    own, slower = surface.params, cycles(source, target)
    l2 = l2_rate(target) * target.max_clock_mhz / target.boost_mhz
    l2_ratio = l2_rate(target) / l2_rate(source)
    shared = target.sm_count * target.max_clock_mhz * 1e6 * SHARED_BYTES_PER_CLOCK
    params = {
        "peak": peak,
        "reach": 1.0,
        "sm_count": float(target.sm_count),
        "l2_bytes": float(target.l2_bytes),
        "shared_bandwidth": shared * (CUDA_CORE_SHARED if dtype == "fp32" else 1.0),
        "l2_bandwidth": l2,
        "bandwidth": own["bandwidth"] * target.usable_bytes_per_second / source.usable_bytes_per_second,
        "prologue": own["prologue"] * slower,
        "epilogue": own["epilogue"] * slower,
        "floor": own["floor"] * slower,
        "split": own["split"] * slower,
        "split_bandwidth": own["split_bandwidth"] * l2_ratio,
        "sharpness": _sharpness(own),
        "quantised": own["quantised"],
        "absorbed": ABSORBED,
        "align4": min(1.0, own["tile_aligned_4"] / own["tile_common"]),
        "align2": min(1.0, own["tile_aligned_2"] / own["tile_common"]),
        "throttle": power.throttle(target, dtype),
        **dict.fromkeys(gemm_before_hopper.TILE_NAMES, 0.0),
    }
    return {**params, "reach": reach(product, tuple(params.items()), burst)}


@lru_cache(maxsize=256)
def reach(variant: GemmVariant, given: tuple[tuple[str, float], ...], rate: float) -> float:
    """The share of the peak that the inner loop has to reach for 8192 cubed to run at `rate` FLOP/s without a power
    limit; the bound of the search where no share does."""
    params = {**dict(given), "throttle": 2.0}
    features = np.full((1, 3), log2(LARGE))
    bytes_, flops = np.array([6.0 * LARGE**2]), np.array([2.0 * LARGE**3])
    low, high = 0.3, 1.3
    for _ in range(20):
        params["reach"] = (low + high) / 2.0
        seconds = float(np.exp(gemm_before_hopper.log_seconds(variant, params, features, bytes_, flops))[0])
        if flops[0] / seconds < rate:
            low = params["reach"]
        else:
            high = params["reach"]
    return params["reach"]


def _sharpness(params: dict[str, float]) -> float:
    """The sharpness of the source's choice among aligned kernels where it was learnt, else SHARPNESS."""
    return params.get(f"{TILE_PREFIX}{FAMILIES[0]}/sharpness", SHARPNESS)
