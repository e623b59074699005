"""How long a kernel that inductor generated takes on a GPU: the shipped law with that GPU's rates.

The law's parameters are those of an H200, fitted to the kernels of compiled steps as they ran there:
`python -m studies.compiled.generated`. On any other GPU they scale with the datasheet, and no measurement has judged
that: what they give is extrapolated, and as little known as a projection of memory-bound kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import exp, hypot, log
from typing import NamedTuple

from flopcast.bounds import Deviation, Positive
from flopcast.decode import load
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec, load_specs
from flopcast.roofline.gpu.laws.generated import GeneratedLaw, Rates, instruction_share, seconds
from flopcast.roofline.gpu.profile.passes import DEFAULT_BANDWIDTH, DEFAULT_CLOCK_MHZ, DEFAULT_SM_COUNT
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.gpu.projection.rates import SIGMA, sigmas
from flopcast.roofline.stream.compiled.generated_kernel import GeneratedKernel

FILE = DATA / "generated_kernels.json"


class Spread(NamedTuple):
    """The deviation of log seconds of kernels that take about so long."""

    seconds: Positive
    sigma: Deviation


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A law, the GPU that it was fitted on, and the deviations of a kernel's log seconds about it, from short kernels
    to long ones: Triton's choices and the launch itself move a short kernel by more."""

    gpu: str
    law: GeneratedLaw
    spreads: Sequence[Spread]
    source: str

    def sigma(self, seconds: float) -> float:
        """The deviation of a kernel that takes so long, between those of the durations on either side."""
        first, *_, last = self.spreads
        if seconds <= first.seconds:
            return first.sigma
        for below, above in pairwise(self.spreads):
            if seconds <= above.seconds:
                part = log(seconds / below.seconds) / log(above.seconds / below.seconds)
                return exp((1 - part) * log(below.sigma) + part * log(above.sigma))
        return last.sigma


@cache
def fitted() -> Fitted:
    return load(Fitted, FILE, "a law of generated kernels", hint="`python -m studies.compiled.generated` makes it")


def generated_seconds(kernel: GeneratedKernel, profile: Profile) -> Estimate:
    """The time of a generated kernel within a step, its operands as warm as the launches before it leave them. The
    deviation is that of log seconds, which all launches of the same kernel share."""
    known = fitted()
    found = seconds(kernel, rates_of_profile(profile), known.law)
    sigma, basis = known.sigma(found), "interpolated"
    if profile.gpu != known.gpu:
        sigma, basis = hypot(sigma, projected_sigma(known.gpu, profile, "memory")), "extrapolated"
    return Estimate(found, sigma, basis, "law of generated kernels")


def share_of_instructions(kernel: GeneratedKernel, profile: Profile) -> float:
    """The share of a generated kernel's time that goes by the clock of the multiprocessors."""
    return instruction_share(kernel, rates_of_profile(profile), fitted().law)


def projected_sigma(gpu: str, profile: Profile, kind: str) -> float:
    """The deviation of log seconds that a law of kernels of this kind (`projection.rates.SIGMA`), fitted on `gpu`, has
    on another GPU besides."""
    specs = load_specs()
    spec = specs.get(profile.gpu)
    return SIGMA[kind] if spec is None else sigmas(specs[gpu], spec)[kind]


def rates_of(spec: GpuSpec) -> Rates:
    return Rates(spec.usable_bytes_per_second, spec.sm_count, spec.boost_mhz * 1e6, spec.l2_bytes)


def rates_of_profile(profile: Profile) -> Rates:
    """The datasheet's where there is one; else those of the device, its bandwidth as much above the read rate as an
    H200's datasheet is above the law's."""
    spec = load_specs().get(profile.gpu)
    if spec is not None:
        return rates_of(spec)
    device = profile.device
    bandwidth = profile.ceiling("hbm_read", profile.ceiling("hbm_copy", DEFAULT_BANDWIDTH)) / fitted().law.read
    clock = (device.get("clock_mhz") or DEFAULT_CLOCK_MHZ) * 1e6
    return Rates(bandwidth, device.get("sm_count") or DEFAULT_SM_COUNT, clock, max(profile.l2_bytes, 1.0))
