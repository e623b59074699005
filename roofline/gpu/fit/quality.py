"""Computes how well a profile fits the rows it was made from, and held-out rows. Plain data; the command line prints
it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.fit.cases import Case
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.conv_1x1 import is_1x1, ways_of
from flopcast.roofline.stream.lowering.variants import SurfaceKey

WORST_ROWS = 5


@dataclass(frozen=True)
class Quality:
    """Errors |predicted / measured - 1| of one surface or class.

    `left_out_*`: each point predicted from the others; `holdout_*`: rows that the fit never saw; None where there are
    no such rows. `worst`: (row key, signed error, role)."""

    name: str
    n: int
    n_holdout: int
    left_out_median: float | None
    left_out_p90: float | None
    holdout_median: float | None
    holdout_p90: float | None
    holdout_coverage: float | None  # share of the held-out rows within their 90% interval
    worst: tuple[tuple[str, float, str], ...] = ()


@dataclass(frozen=True)
class FitReport:
    """How well a profile fits, per surface and per class. `unused`: number of rows without a time, by status."""

    surfaces: list[Quality]
    classes: list[Quality]
    n: int
    n_holdout: int
    n_throttled: int
    unused: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def quality_report(
    profile: Profile, fitted: Sequence[Case], held: Sequence[Case], n_throttled: int,
    unused: dict[str, int], warnings: list[str],
) -> FitReport:  # fmt: skip
    left_out: dict[SurfaceKey, list[tuple[Case, float, float]]] = defaultdict(list)
    groups: dict[SurfaceKey, list[Case]] = defaultdict(list)
    for case in fitted:
        groups[case.surface].append(case)
    for key, group in groups.items():
        # of convolutions those of the other cache state come after a surface's own
        errors, sigmas = (found[: len(group)] for found in profile.surfaces[key].leave_one_out)
        left_out[key] = list(zip(group, np.expm1(errors).tolist(), sigmas.tolist(), strict=True))
    out_of_sample: dict[SurfaceKey, list[tuple[Case, float, float]]] = defaultdict(list)
    for case, found in zip(
        held, profile.estimate([(case.work, case.backend, case.cache) for case in held]), strict=True
    ):
        out_of_sample[case.surface].append((case, found.seconds / case.seconds - 1.0, found.sigma))
    keys = sorted({*left_out, *out_of_sample}, key=str)
    surfaces = [_quality(str(key), left_out[key], out_of_sample[key]) for key in keys]
    by_class: dict[str, list[SurfaceKey]] = defaultdict(list)
    for key in keys:
        by_class[f"{key.backend}/{key.op_class}/{key.cache}"].append(key)
    classes = [
        _quality(name, [e for n in members for e in left_out[n]], [e for n in members for e in out_of_sample[n]])
        for name, members in sorted(by_class.items())
    ]
    missing = [key for key in keys if key not in profile.surfaces and not _has_products(key, profile)]
    if missing:
        warnings.append(f"{len(missing)} held-out variants have no surface of their own, the first {missing[0]}")
    return FitReport(surfaces, classes, len(fitted), len(held), n_throttled, unused, warnings)


def _has_products(key: SurfaceKey, profile: Profile) -> bool:
    """Whether a 1x1 convolution is known by its products."""
    variant = key.variant
    return is_1x1(variant) and all(
        any(replace(key, variant=way) in profile.surfaces for way in ways) for ways in ways_of(variant)
    )


def _quality(
    name: str, left_out: Sequence[tuple[Case, float, float]], held: Sequence[tuple[Case, float, float]]
) -> Quality:
    """Summarizes errors; left-out points count only where there are several: a single point has no others to be
    predicted from."""
    inner = np.abs([error for _, error, _ in left_out]) if len(left_out) > 1 else np.empty(0)
    outer = np.abs([error for _, error, _ in held])
    within = [abs(np.log1p(error)) <= Z_90 * float(np.hypot(sigma, case.noise)) for case, error, sigma in held]
    everything = [(case.key, error, "fit") for case, error, _ in left_out if len(left_out) > 1]
    everything += [(case.key, error, "holdout") for case, error, _ in held]
    worst = tuple(sorted(everything, key=lambda item: -abs(item[1]))[:WORST_ROWS])
    return Quality(
        name, len(left_out), len(held), _quantile(inner, 0.5), _quantile(inner, 0.9), _quantile(outer, 0.5),
        _quantile(outer, 0.9), float(np.mean(within)) if within else None, worst,
    )  # fmt: skip


def _quantile(values: Array, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
