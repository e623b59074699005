"""Completes a measured profile with kinds of kernel projected from another GPU's profile.

That is more accurate than their bytes at copy bandwidth. A short suite measures what Qwen3 steps launch, but no
convolution, no other precision and no fused kernel. Where the GPU's datasheet is known, those kinds are projected from
a measured profile that has them (`project.py`) and labelled "extrapolated", with the projection's standard deviation,
in `Profile.projected_kinds`. Measured surfaces are never replaced, and a kind measured cold keeps its own estimate for
hot operands (`profile/unmeasured.py`). On an H100 a step of ResNet-50 is forecast 27% low without its convolutions, and
5% high with the H200's, projected.

One card does not show how much cards of its model differ: where one was measured, the spread is that of the source's
cards (`Profile.card_spread`), times root two, because both this card and another deviate from the median card.

A host is not part of a GPU: where the source's host, measured on more machines, has the same processor, it replaces
this profile's. Otherwise a comparison of two GPUs would include the difference between two rented machines: with the
host of its own machine the narrowest step takes 12% longer on an H100 than with the H200's, the median of five machines
with the same processor.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.projection.project import project
from flopcast.roofline.gpu.projection.rates import sigmas


def complete(measured: Profile, source: Profile, spec: GpuSpec, own: GpuSpec) -> Profile:
    """Adds to the measured profile of the GPU `spec` the kinds of kernel that only `source` (of the GPU `own`) has, and
    the spread of the source's cards.

    Raises UsageError as `project` does."""
    there = project(source, spec)
    lent = {
        key: surface
        for key, surface in there.surfaces.items()
        if key not in measured.surfaces and key.with_cache("cold") not in measured.surfaces
    }
    notes: dict[str, Any] = {}
    if lent:
        notes["projected_kinds"] = {"from": source.gpu, "sigma": sigmas(own, spec), "surfaces": sorted(map(str, lent))}
    if not measured.card_spread and source.card_spread:
        kept = {
            name: {"sigma": found["sigma"], "factors": found["factors"]}
            for name, found in source.card_spread["classes"].items()
        }
        notes["cards_lent"] = {"from": source.gpu, "classes": kept, "times": sqrt(2.0)}
    return replace(measured, surfaces={**measured.surfaces, **lent}, provenance={**measured.provenance, **notes})
