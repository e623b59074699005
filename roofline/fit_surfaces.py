"""All surfaces of a folder of measurements, each with a prior from its kin and the ceilings. scipy, at fit
time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flopcast.roofline import laws, regress
from flopcast.roofline.lower import Work
from flopcast.roofline.profile import Number, surface_name
from flopcast.roofline.regress import Belief, Points, Prior
from flopcast.roofline.surface import Surface

# What is believed of residuals timed by the wall clock, on a processor: threads, caches and neighbours
# make them several times those of a GPU (there 0.05 and 0.015 for kernels that move bytes).
WALL_AMPLITUDE, WALL_WHITE = 0.15, 0.08


@dataclass(frozen=True)
class Case:
    """A measured row as the fit sees it."""

    row: dict[str, Any]
    work: Work
    backend: str
    cache: str
    seconds: float
    noise: float

    @property
    def surface(self) -> str:
        return surface_name(self.backend, self.work.op_class, self.work.variant, self.cache)


def fit_surfaces(
    cases: Sequence[Case],
    device: Mapping[str, Any],
    peaks: Mapping[str, Number],
    ceilings: Mapping[str, Number],
) -> tuple[dict[str, Surface], int]:
    """(surface by name, number of rows that were given no weight)."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.surface].append(case)
    kinds = {name: laws.kind_of(group[0].work.op_class) for name, group in groups.items()}
    fitted: dict[str, Surface] = {}
    doubtful = 0
    priors = _memory_priors({name: groups[name] for name in groups if kinds[name] == "memory"}, ceilings)
    donors: dict[tuple[str, str], Surface] = {}
    # the surface with most points first: what it learns of tiles and floors is what the others start from
    for name, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        work, points = group[0].work, _points(group)
        kin = group[0].backend, work.op_class
        prior = priors.get(name) or _dense_prior(work, points, device, peaks, ceilings)
        if kin in donors:
            prior = prior.learnt_from(donors[kin], 0.7)
        if any(case.row.get("timer") == "wall" for case in group):
            prior = replace(prior, hyper=replace(prior.hyper, amplitude=WALL_AMPLITUDE, white=WALL_WHITE))
            fitted[name], count = regress.fit_doubtful(kinds[name], work.variant, points, prior)
            doubtful += count
        else:
            fitted[name] = regress.fit_surface(kinds[name], work.variant, points, prior)
        if kinds[name] != "memory":
            donors.setdefault(kin, fitted[name])
    return {name: fitted[name] for name in sorted(fitted)}, doubtful


def _points(group: Sequence[Case]) -> Points:
    return Points(
        np.array([case.work.features for case in group], float),
        np.array([case.work.bytes for case in group], float),
        np.array([case.work.flops for case in group], float),
        np.array([case.seconds for case in group], float),
        np.array([case.noise for case in group], float),
    )


def _floor(ceilings: Mapping[str, Number]) -> float:
    for name in ("kernel_floor_cupti", "kernel_floor"):
        if name in ceilings:
            return ceilings[name].value
    return 2e-6


def _bandwidth(ceilings: Mapping[str, Number], cache: str) -> float:
    names = ("l2_copy", "hbm_copy") if cache == "hot" else ("hbm_copy", "l2_copy")
    return next((ceilings[name].value for name in names if name in ceilings), 1e12)


def _memory_priors(groups: Mapping[str, list[Case]], ceilings: Mapping[str, Number]) -> dict[str, Prior]:
    """Each law is fitted once from the ceilings; what the laws of a class came out as is then what is
    believed of each, so that a variant of one point is taken for a typical one of its class."""
    first: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for group in groups.values():
        work, cache, points = group[0].work, group[0].cache, _points(group)
        floor, bandwidth = Belief(_floor(ceilings), 0.5), Belief(_bandwidth(ceilings, cache), 0.7)
        prior = _memory_prior(work, points, floor, bandwidth)
        first[work.op_class, cache].append(regress.fit_law("memory", work.variant, points, prior))
    priors = {}
    for name, group in groups.items():
        kin = first[group[0].work.op_class, group[0].cache]
        floor, bandwidth = _typical(kin, "floor", 0.3), _typical(kin, "bandwidth", 0.3)
        priors[name] = _memory_prior(group[0].work, _points(group), floor, bandwidth)
    return priors


def _typical(laws_: Sequence[Mapping[str, float]], name: str, least: float) -> Belief:
    values = np.log([params[name] for params in laws_])
    return Belief(float(np.exp(np.median(values))), float(np.clip(values.std(), least, 0.7)))


def _memory_prior(work: Work, points: Points, floor: Belief, bandwidth: Belief) -> Prior:
    return regress.memory_prior(
        floor, bandwidth, laws.inputs("memory", work.variant, {}, points.features).shape[1]
    )


def _dense_prior(
    work: Work,
    points: Points,
    device: Mapping[str, Any],
    peaks: Mapping[str, Number],
    ceilings: Mapping[str, Number],
) -> Prior:
    tokens = work.variant.split("/")
    peak = next((peaks[token].value for token in tokens if token in peaks), None)
    if peak is None:  # fp64, or a processor where only fp32 was tried: the least that is known
        peak = min((number.value for number in peaks.values()), default=1e12)
    sm_count = float(device.get("sm_count") or 1)
    inputs = laws.inputs(work.op_class, work.variant, {"sm_count": sm_count}, points.features).shape[1]
    floor, bandwidth = _floor(ceilings), _bandwidth(ceilings, "cold")
    if work.op_class == "gemm":
        l2_bytes = float(device.get("l2_bytes") or 0.0)
        return regress.gemm_prior(peak, sm_count, floor, bandwidth, l2_bytes, inputs)
    return regress.attention_prior(peak, sm_count, floor, bandwidth, inputs)
