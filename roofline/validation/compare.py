"""Finds what got faster or slower, beyond noise, between two profiles or two folders of measurements, class by class.

Every measurement that both hold gives a ratio, time of b over time of a. A class is judged by its median ratio and the
noise of that median: half the width of the 98% interval that it would have if nothing had changed,

    2.33 x hypot(scatter of the ratios / sqrt(rows) x 1.25,  common deviation of the two runs)

Scatter is the robust deviation of the ratios in the class, and at least the deviation that the samples of a row imply.
The common deviation, of whole runs, is shared by all rows of a class: more rows do not lower it. Parts: clocks and
temperature (0.2% per run), and the residue of the gap between kernels, which differs from process to process, after its
subtraction (0.018 us: 0.4% of a kernel of 5 us). The class medians of three runs over two H200s differ accordingly: by
up to 0.5% where rows are long, 1.1% where they are short, 2% for four rows of 1.5 us and 4% for fills of 1 us. Scalars
keep their gap (0.1 us). Two terms are added to the common deviation: that of an estimate, where one side did not
measure a shape, and that between cards of one kind, where the two profiles are not of the same cards. Host costs differ
by a quarter from run to run (`fit_host`), so only large changes of theirs exceed the noise.

A class has regressed if its median is slower beyond noise and by more than the tolerance, or if many of its rows (a
single one for ceilings) are, each beyond its own noise, although the median is not. For two profiles the forecasts of
two steps are compared as well (`step_changes`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flopcast.errors import DataError
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.lowering.variants import Variant
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.validation.compare_sides import (
    MEDIAN_LOSS,
    Side,
    Timing,
    as_points,
    common_of,
    differences,
    group_of,
)

TOLERANCE = 0.03
Z = 2.326  # of a 98% interval: at either end, one class per hundred is called changed by chance
ROW_Z = 4.0  # for thousands of rows, whose noise has longer tails than a normal distribution
ROW_LOG = 0.005  # deviation of a row's logarithm besides that of its samples
MANY_ROWS, MANY_SHARE = 5, 0.05  # least excess of slower over faster rows in a class, as a count and as a share
ROWS_SHOWN = 10
_MAD = 1.4826


@dataclass(frozen=True)
class RowChange:
    """A measurement that differs beyond its own noise. `change`: 0.1 is 10% more time in b."""

    group: str
    name: str
    seconds_a: float
    seconds_b: float
    change: float
    noise: float


@dataclass(frozen=True)
class Change:
    """The change of a class. `change`: median over its rows, 0.1 is 10% more time in b; `noise`: see the module; `low`,
    `high`: the 10th and 90th percentile of the rows. `verdict`: slower, faster, same. `slower`, `faster`: numbers of
    rows beyond their own noise and the tolerance."""

    group: str
    rows: int
    change: float
    noise: float
    low: float
    high: float
    slower: int
    faster: int
    verdict: str
    has_regressed: bool


@dataclass(frozen=True)
class Comparison:
    """A comparison of a and b. `differences`: (what, value of a, value of b) of devices and stacks. `unmatched`: the
    numbers of measurements that only a, and only b, has."""

    a: str
    b: str
    tolerance: float
    differences: Sequence[tuple[str, Any, Any]]
    changes: Sequence[Change]
    rows: Sequence[RowChange]
    unmatched: tuple[int, int]
    warnings: Sequence[str] = field(default_factory=tuple)

    @property
    def of_one_kind(self) -> bool:
        """Whether both are of GPUs of one name; between two kinds of GPU, slower is no regression."""
        return all(what != "name" for what, _, _ in self.differences)

    @property
    def regressed(self) -> list[Change]:
        return [change for change in self.changes if change.has_regressed]

    def to_json(self) -> dict[str, Any]:
        names = ("what", "a", "b")
        return {
            "a": self.a,
            "b": self.b,
            "tolerance": self.tolerance,
            "regressed": [change.group for change in self.regressed],
            "differences": [dict(zip(names, found, strict=True)) for found in self.differences],
            "classes": [asdict(change) for change in self.changes],
            "rows": [asdict(row) for row in self.rows],
            "unmatched": {"a": self.unmatched[0], "b": self.unmatched[1]},
            "warnings": list(self.warnings),
        }


# --- comparison


def compare(a: Side, b: Side, tolerance: float = TOLERANCE) -> Comparison:
    """Compares two sides class by class. Raises DataError if they have no measurement in common."""
    if a.kind != b.kind:
        a, b = as_points(a), as_points(b)
    pairs = [(key, one, b.timings[key]) for key, one in a.timings.items() if key in b.timings]
    matched_b = len(pairs)
    warnings = []
    if a.profile is not None and b.profile is not None and all(_is_scalar(one) for _, one, _ in pairs):
        pairs += _estimated(a, b.profile)
        warnings.append("no shape was measured for both: the second's times are estimates")
    only = len(a.timings) - len(pairs), len(b.timings) - matched_b
    if not pairs:
        raise DataError(
            f"{a.label} and {b.label} have no measurement in common: compare two runs of one suite, or two profiles"
        )
    for side in (a, b):
        if side.profile is not None and side.profile.basis != "measured":
            warnings.append(f"{side.label} is {side.profile.basis}, not measured: its doubt counts as noise")
    grouped: dict[str, list[tuple[Timing, Timing]]] = defaultdict(list)
    for _, one, two in pairs:
        grouped[one.group].append((one, two))
    changes, rows = [], []
    apart = {} if a.cards & b.cards else _cards_apart(a) or _cards_apart(b)
    for group, members in sorted(grouped.items(), key=lambda item: (_order(item[0]), item[0])):
        change, odd = _change(group, members, tolerance, apart.get(group, 0.0))
        changes.append(change)
        rows += odd
    rows.sort(key=lambda row: -abs(math.log1p(row.change)) / row.noise)
    return Comparison(a.label, b.label, tolerance, differences(a, b), changes, rows, only, warnings)


def _cards_apart(side: Side) -> dict[str, float]:
    """Card-to-card standard deviation of the logarithm of each class's time, from a profile of several cards."""
    classes = ((side.profile.provenance.get("gpus") or {}).get("classes") or {}) if side.profile is not None else {}
    found = {}
    for name, entry in classes.items():
        op_class, _, cache = name.partition("/")
        factors = list((entry.get("factors") or {}).values())
        if len(factors) > 1:  # one card alone has no deviation
            found[group_of(op_class, "torch", cache)] = float(np.std(np.log(factors), ddof=1))
    return found


def _is_scalar(timing: Timing) -> bool:
    return timing.group.startswith(("ceiling, ", "host, "))


def _order(group: str) -> int:
    return 2 if group.startswith("host, ") else 1 if group.startswith("ceiling, ") else 0


def _estimated(a: Side, other: Profile) -> list[tuple[str, Timing, Timing]]:
    """Pairs the points of profile `a` with the other profile's estimates of them."""
    assert a.profile is not None
    found = {}  # the last of several points with the same features counts, as in the timings
    for key, surface in a.profile.own_surfaces.items():
        works = [
            _Work(key.op_class, key.variant, features, round(size), round(flops))
            for features, size, flops in zip(surface.features, surface.bytes, surface.flops, strict=True)
        ]
        asked = [(work, key.backend, key.cache) for work in works]
        for work, estimate in zip(works, other.estimate(asked), strict=True):
            name = f"{key}/{work.features}"
            one = a.timings[name]
            found[name] = name, one, Timing(one.group, estimate.seconds, 0.0, estimate.sigma, one.name)
    return list(found.values())


@dataclass(frozen=True)
class _Work:
    op_class: str
    variant: Variant
    features: tuple[float, ...]
    bytes: int
    flops: int


def _change(
    group: str, members: Sequence[tuple[Timing, Timing]], tolerance: float, cards: float
) -> tuple[Change, list[RowChange]]:
    ratios = np.array([math.log(b.seconds / a.seconds) for a, b in members])
    own = np.array([math.hypot(a.sigma, b.sigma, ROW_LOG) for a, b in members])
    common = np.array([math.hypot(common_of(a), common_of(b), cards) for a, b in members])
    middle = float(np.median(ratios))
    scatter = max(float(_MAD * np.median(np.abs(ratios - middle))), float(np.median(own)))
    count = len(members)
    statistical = MEDIAN_LOSS * scatter / math.sqrt(count) if count > 2 else scatter
    noise = Z * math.hypot(statistical, float(np.median(common)))
    row_noise = ROW_Z * np.hypot(own, np.hypot(common, scatter))
    beyond = np.abs(ratios) > np.maximum(row_noise, math.log1p(tolerance))
    slower, faster = int((beyond & (ratios > 0)).sum()), int((beyond & (ratios < 0)).sum())
    verdict = "same" if abs(middle) <= noise else "slower" if middle > 0 else "faster"
    least = 1 if group.startswith("ceiling, ") else max(MANY_ROWS, MANY_SHARE * count)
    many = slower - faster >= least
    low, high = (float(np.expm1(q)) for q in np.quantile(ratios, [0.1, 0.9]))
    change = Change(
        group, count, math.expm1(middle), math.expm1(noise), low, high, slower, faster, verdict,
        (verdict == "slower" and math.expm1(middle) > tolerance) or many,
    )  # fmt: skip
    odd = [
        RowChange(group, a.name, a.seconds, b.seconds, math.expm1(ratio), math.expm1(noise_))
        for (a, b), ratio, noise_, is_odd in zip(members, ratios.tolist(), row_noise.tolist(), beyond, strict=True)
        if is_odd
    ]
    return change, odd


STEPS = (
    ("qwen3-0.6b", "4 x 256", Run()),
    ("qwen3-0.6b", "8 x 1024, fused AdamW", Run(batch=8, seq=1024, optimizer="adamw-fused")),
)


@dataclass(frozen=True)
class StepChange:
    """A step forecast with each of two profiles: seconds with the ends of a 90% interval, and the device's seconds."""

    name: str
    a: tuple[float, float, float]
    b: tuple[float, float, float]
    device_a: float
    device_b: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def step_changes(a: Profile, b: Profile) -> list[StepChange]:
    """Forecasts STEPS with both profiles, from the shipped op streams; empty if either is of a CPU."""
    if "cpu" in (a.device.get("type"), b.device.get("type")):
        return []
    found = []
    for model, how, run in STEPS:
        one, two = (forecast(load_config(model), run, profile) for profile in (a, b))
        a_ends, b_ends = ((f.step_seconds, f.step_seconds_low, f.step_seconds_high) for f in (one, two))
        found.append(StepChange(f"{model}, {how}", a_ends, b_ends, one.device_seconds, two.device_seconds))
    return found
