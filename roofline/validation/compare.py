"""What got faster and what slower between two profiles, or two folders of measurements: by class, beyond noise. numpy.

Every measurement that both hold gives a ratio, time of b over time of a. Of a class the median ratio counts, and its
noise: half a 98% interval of what the median would differ by if nothing had changed,

    2.33 x hypot(scatter of the ratios / sqrt(rows) x 1.25,  what whole runs differ by)

Scatter is the robust deviation of the ratios in the class, at the least what the samples of a row allow for. What whole
runs differ by is common to all rows of a class and no number of rows lowers it: clocks and temperature (0.2% of each),
and what is left of the gap between kernels, another in each process, where it has been taken off (0.018 us: 0.4% of a
kernel of 5 us). Three runs over two H200s differ so, class medians: up to 0.5% where rows are long, 1.1% where they are
short, 2% for four rows of 1.5 us and 4% for fills of 1 us. Scalars keep their gap (0.1 us). An estimate, where one did
not measure a shape, adds its own deviation, as common; so does what cards of a kind differ by as wholes, where two
profiles are not of the same ones. Host costs differ from run to run by a quarter (`fit_host`), and so count for little.

A class has regressed where it is slower beyond noise and by more than the tolerance, or where many of its rows (of
ceilings a single one) have, each beyond the noise of its own, though the median has not. Of two profiles the forecasts
of two steps are compared besides (`compare_steps.py`).
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
Z = 2.326  # of a 98% interval: one class of a hundred is called changed by chance, at either end
ROW_Z = 4.0  # of thousands of rows; their noise has longer tails than the normal's
ROW_LOG = 0.005  # and of what a row differs by beside it
MANY_ROWS, MANY_SHARE = 5, 0.05  # of a class, slower each for itself, by more than as many are faster
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
    """A class. `change`: median over its rows, 0.1 is 10% more time in b; `noise`: see above; `low`, `high`: the 10th
    and 90th percentile of the rows. `verdict`: slower, faster, same. `slower`, `faster`: rows beyond their own noise
    and the tolerance."""

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
    """All of it. `differences`: (what, of a, of b) of devices and stacks. `unmatched`: measurements of only one."""

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
        """Whether both are of GPUs of one name: of two kinds the slower has not regressed."""
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


# --- compared


def compare(a: Side, b: Side, tolerance: float = TOLERANCE) -> Comparison:
    """Raises DataError where the two have nothing in common."""
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
    """Deviation of the logarithm, card to card, of a class as a whole; of a profile of several cards."""
    classes = ((side.profile.provenance.get("gpus") or {}).get("classes") or {}) if side.profile is not None else {}
    found = {}
    for name, entry in classes.items():
        op_class, _, cache = name.partition("/")
        factors = list((entry.get("factors") or {}).values())
        if len(factors) > 1:  # one card lies apart from none
            found[group_of(op_class, "torch", cache)] = float(np.std(np.log(factors), ddof=1))
    return found


def _is_scalar(timing: Timing) -> bool:
    return timing.group.startswith(("ceiling, ", "host, "))


def _order(group: str) -> int:
    return 2 if group.startswith("host, ") else 1 if group.startswith("ceiling, ") else 0


def _estimated(a: Side, other: Profile) -> list[tuple[str, Timing, Timing]]:
    """The points of a profile with another's estimates of them."""
    assert a.profile is not None
    found = {}  # of points with the same features the last counts, as in the timings
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
    """A step forecast with either profile: seconds with the ends of a 90% interval, and the device's part."""

    name: str
    a: tuple[float, float, float]
    b: tuple[float, float, float]
    device_a: float
    device_b: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def step_changes(a: Profile, b: Profile) -> list[StepChange]:
    """Of STEPS, by their shipped streams; none where one of the two is a processor."""
    if "cpu" in (a.device.get("type"), b.device.get("type")):
        return []
    found = []
    for model, how, run in STEPS:
        one, two = (forecast(load_config(model), run, profile) for profile in (a, b))
        a_ends, b_ends = ((f.step_seconds, f.step_seconds_low, f.step_seconds_high) for f in (one, two))
        found.append(StepChange(f"{model}, {how}", a_ends, b_ends, one.device_seconds, two.device_seconds))
    return found
