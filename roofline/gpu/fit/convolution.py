"""Priors of convolution surfaces, from the surfaces of the same direction, dtype and layout. Used at fit time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from flopcast.roofline.gpu.fit import surface
from flopcast.roofline.gpu.fit.priors import Belief, Prior, typical
from flopcast.roofline.gpu.fit.surface import Points
from flopcast.roofline.gpu.profile.gaussian_process import Residual
from flopcast.roofline.stream.lowering.variants import ConvVariant, SurfaceKey

# Start values: three kernels per call; products at 0.4 of the peak; tensors read and written once, or three times where
# the call changes their layout.
KERNELS, SHARE_OF_PEAK = 3.0, 0.4
PASSES = {"nchw": 3.0, "nhwc": 1.0}
WIDE, LEAST = 0.8, 0.25
AMPLITUDE, WHITE, LEVEL = 0.15, 0.05, 0.1


def conv_priors(
    groups: Mapping[SurfaceKey, Points], floor: float, bandwidth: float, peaks: Mapping[str, float], sm_count: float
) -> dict[SurfaceKey, Prior]:
    """The prior of each surface, from the points of all.

    Each law is first fitted with a prior from the ceilings; the median and spread of the fitted parameters of a
    direction, dtype and layout are then the prior of each surface of that group."""
    first: dict[SurfaceKey, tuple[Prior, dict[str, float]]] = {}
    kin: dict[tuple[str, str, str], list[dict[str, float]]] = defaultdict(list)
    for key, points in groups.items():
        dtype, layout = _kin(key)[1:]
        peak = peaks.get("tf32" if dtype == "fp32" else dtype) or min(peaks.values(), default=1e12)
        law = {
            "floor": Belief(KERNELS * floor, WIDE),
            "rate": Belief(SHARE_OF_PEAK * peak, WIDE),
            "bandwidth": Belief(bandwidth / PASSES.get(layout, 1.0), WIDE),
        }
        hyper = Residual((3.0, 3.0, 3.0, 2.0), AMPLITUDE, WHITE, (LEVEL,))
        prior = Prior(law, {"sm_count": sm_count}, hyper)
        params = surface.fit_law("conv", key.variant, points, prior)
        first[key] = prior, params
        kin[_kin(key)].append(params)
    priors = {}
    for key, (prior, _) in first.items():
        alike = kin[_kin(key)]
        priors[key] = replace(prior, law={term: typical(alike, term, LEAST, WIDE) for term in prior.law})
    return priors


def _kin(key: SurfaceKey) -> tuple[str, str, str]:
    """Direction, dtype and layout."""
    variant = key.variant
    assert isinstance(variant, ConvVariant), key
    return variant.direction, variant.dtype, variant.layout
