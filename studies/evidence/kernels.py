"""Held-out kernels beside what a profile says of them: rows that were measured with the others and never fitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import hypot, log
from pathlib import Path
from statistics import fmean, median

import numpy as np

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.gpu.fit.cases import Case, case_of
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.stream.lowering.conv_1x1 import SIZES, wholes_of
from flopcast.roofline.stream.lowering.variants import GemmVariant, SurfaceKey, Variant


@dataclass(frozen=True)
class Held:
    """The held-out rows of a kind of kernels: how many, |error| of the time, the share inside the 90% interval, and
    that interval's mean width over the time."""

    n: int
    median: float
    p90: float
    coverage: float
    width: float


def held_out(folder: Path, profile: Profile) -> dict[str, Held]:
    """By backend, class and state of the cache ("torch gemm cold"), of the rows of a folder of measurements."""
    rows = [row for row in read_folder(folder).rows if row.get("role") == "holdout" and row.get("shape")]
    return by_kind(rows, profile)


def by_kind(rows: Iterable[FitRow], profile: Profile, *, told_apart: bool = False) -> dict[str, Held]:
    """The same of rows, all of them held out; `told_apart`: products with unaligned rows ("gemm unaligned") and in fp32
    and tf32 ("gemm wide") are kinds of their own."""
    gap = profile.ceiling("graph_gap", 0.0)
    done = [row for row in rows if row["status"] == "ok"]
    seen = _Seen(profile)
    cases = [case for row in done if (case := case_of(row, gap, [])) is not None and not seen.has(case)]
    kinds: dict[str, list[tuple[Case, Estimate]]] = defaultdict(list)
    estimates = profile.estimate([(case.work, case.backend, case.cache) for case in cases])
    for case, found in zip(cases, estimates, strict=True):
        more = _more(case.work.variant) if told_apart else ""
        kinds[f"{case.backend} {case.work.op_class}{more} {case.cache}"].append((case, found))
    return {name: _held(members) for name, members in sorted(kinds.items())}


class _Seen:
    """The sizes that the fit has seen, by surface."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._known: dict[SurfaceKey, set[tuple[float, ...]]] = {}

    def has(self, case: Case) -> bool:
        """Whether the fit has seen a row of exactly these sizes, as other shapes may have: such a row tests nothing."""
        key = case.surface
        if key not in self._known:
            known = [own for own in self._profile.surfaces if key in _as_wholes(own)]
            self._known[key] = {_rounded(row[:SIZES]) for own in known for row in self._profile.surfaces[own].features}
        return _rounded(case.work.features) in self._known[key]


def _as_wholes(key: SurfaceKey) -> list[SurfaceKey]:
    """The key, or those of the convolutions that a product is a part of."""
    return [replace(key, variant=whole) for whole in wholes_of(key.variant)]


def _rounded(features: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in features)


def _more(variant: Variant) -> str:
    if not isinstance(variant, GemmVariant):
        return ""
    return " wide" if variant.item_bytes > 2 else "" if variant.is_aligned else " unaligned"


def _held(members: list[tuple[Case, Estimate]]) -> Held:
    logs = [log(found.seconds / case.seconds) for case, found in members]
    sigmas = [hypot(found.sigma, case.noise) for case, found in members]
    errors = [abs(np.expm1(value)) for value in logs]
    return Held(
        len(members),
        median(errors),
        float(np.quantile(errors, 0.9)),
        fmean(abs(value) <= Z_90 * sigma for value, sigma in zip(logs, sigmas, strict=True)),
        fmean(2 * np.sinh(Z_90 * sigma) for sigma in sigmas),
    )
