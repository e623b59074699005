"""How long a kernel that inductor generated takes on a GPU: the shipped law with that GPU's rates.

The law's parameters are those of an H200, fitted to the kernels of compiled steps as they ran there:
`python -m studies.compiled.generated`. On any other GPU they scale with the datasheet, and no measurement has judged
that: what they give is projected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from flopcast.bounds import Deviation
from flopcast.decode import load
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec
from flopcast.roofline.gpu.laws.generated import GeneratedLaw, Rates, seconds
from flopcast.roofline.stream.compiled.launches import Launch

FILE = DATA / "generated_kernels.json"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A law, the GPU that it was fitted on, and the deviations of a launch's log seconds about it: by kind, `sigma` for
    kinds of which too few were seen."""

    gpu: str
    law: GeneratedLaw
    sigma: Deviation
    sigmas: Mapping[str, Deviation]
    source: str


class Estimate(NamedTuple):
    """Seconds of a launch; the deviation of log seconds, which all launches of the same kernel share; and "measured" on
    the GPU that the law was fitted on, "projected" on any other."""

    seconds: float
    sigma: float
    basis: str


@cache
def fitted() -> Fitted:
    return load(Fitted, FILE, "a law of generated kernels", hint="`python -m studies.compiled.generated` makes it")


def generated_seconds(launch: Launch, spec: GpuSpec) -> Estimate:
    """The time of a generated kernel within a step, its operands as warm as the launches before it leave them. Raises
    DataError for a launch of another kind."""
    known = fitted()
    return Estimate(
        seconds(launch, rates_of(spec), known.law),
        known.sigmas.get(launch.kind.value, known.sigma),
        "measured" if spec.name == known.gpu else "projected",
    )


def rates_of(spec: GpuSpec) -> Rates:
    return Rates(spec.usable_bytes_per_second, spec.sm_count, spec.boost_mhz * 1e6, spec.l2_bytes)
