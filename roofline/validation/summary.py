"""Sums up forecast errors over sets of steps: by component, by what bounds the step, and beside other methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flopcast.roofline.validation.baselines import calibrated
from flopcast.roofline.validation.step_comparison import METHODS, Part, StepComparison
from flopcast.roofline.validation.step_plans import FAMILIES, FINE_TUNE, OPTIONS, PATCHED

# Groups of steps other than plain Qwen3, which the forecast is made for: each is summed up separately.
GROUP_LABELS = {OPTIONS: "options", PATCHED: "patched with other kernels", FAMILIES: "other families",
                FINE_TUNE: "fine-tuning and other optimizers"}  # fmt: skip
METHOD_LABELS = {
    "step": "this forecast",
    "roofline": "roofline, datasheet peaks",
    "six_n": "6N x tokens / (0.4 x peak)",
    "torch": "torch RuntimeEstimator",
}
CALIBRATED = "_calibrated"  # ends the name of a method with one factor


@dataclass(frozen=True)
class Errors:
    """The errors of several forecasts: how many, the median and the greatest |error|, the median signed error."""

    n: int
    median: float | None
    worst: float | None
    signed: float | None


def errors_of(parts: Iterable[Part]) -> Errors:
    """The errors of those parts that have one."""
    found = [part.error for part in parts if part.error is not None]
    if not found:
        return Errors(0, None, None, None)
    return Errors(len(found), median(map(abs, found)), max(map(abs, found)), median(found))


@dataclass(frozen=True)
class Summary:
    """The errors of a set of steps by component; "profile_host_step" is the step with the profile's host. `coverage`,
    `device_coverage`: the share of step times, and of device times, inside their 90% intervals; `interval_width`: mean
    width of the step's interval over the forecast step. Both also with the profile's host."""

    label: str
    n: int
    parts: Mapping[str, Errors]
    coverage: float | None
    device_coverage: float | None
    interval_width: float | None
    profile_host_coverage: float | None
    profile_host_width: float | None

    def to_json(self) -> dict[str, Any]:
        errors = {
            f"{name}_{what}": getattr(found, what) for name, found in self.parts.items() for what in ("median", "worst")
        }
        return {"rows": self.label, "n": self.n, **errors, "coverage": self.coverage,
                "device_coverage": self.device_coverage, "interval_width": self.interval_width,
                "profile_host_coverage": self.profile_host_coverage,
                "profile_host_width": self.profile_host_width}  # fmt: skip


def summaries(rows: Sequence[StepComparison]) -> list[Summary]:
    """Summaries of plain Qwen3 steps, of all and by what bounds them, then of each other group; none of an empty set.

    Steps that the intervals are estimated from are in no summary.
    """
    done = [row for row in rows if row.status == "ok" and not row.used_in_intervals]
    sets = {
        **by_bound([row for row in done if row.plan.group not in GROUP_LABELS]),
        **{label: [row for row in done if row.plan.group == group] for group, label in GROUP_LABELS.items()},
    }
    return [summary(label, members) for label, members in sets.items() if members]


def busy_words(rows: Sequence[StepComparison]) -> str:
    """A sentence on the steps that ran beside other processes' work; "" where none did."""
    shares = [row.others_share or 0.0 for row in rows if row.is_busy]
    if not shares:
        return ""
    return (
        f"The machine was busy: other processes kept {median(shares):.0%} of its cores (up to {max(shares):.0%}) while "
        f"{len(shares)} of {len(rows)} steps ran, whose times say little about the forecasts; run them again when it "
        "is quiet, into another folder."
    )


def by_bound(rows: Sequence[StepComparison]) -> dict[str, list[StepComparison]]:
    """All steps, and those that the device and the host bound."""
    return {
        "all": list(rows),
        "device-bound": [row for row in rows if not row.is_host_bound],
        "host-bound": [row for row in rows if row.is_host_bound],
    }


def summary(label: str, rows: Sequence[StepComparison]) -> Summary:
    """The errors of these steps, of which there is one at least."""
    return Summary(
        label,
        len(rows),
        {
            **{name: errors_of(row.parts[name] for row in rows) for name in rows[0].parts},
            "profile_host_step": errors_of(row.profile_host_step for row in rows),
        },
        _mean(row.step.is_within for row in rows),
        _mean(row.device.is_within for row in rows),
        _mean(row.step.interval_width for row in rows),
        _mean(row.profile_host_step.is_within for row in rows),
        _mean(row.profile_host_step.interval_width for row in rows),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Inside:
    """How many of the steps that can judge the 90% intervals lie inside theirs; `setters`: steps left out, whose errors
    set the intervals' width."""

    count: int
    judged: int
    setters: int

    @property
    def words(self) -> str:
        """The count in words: "94 of 106 inside the 90% interval (12 more steps set its width)"."""
        left = f" ({self.setters} more steps set its width)" if self.setters else ""
        return f"{self.count} of {self.judged} inside the 90% interval{left}"


def inside(rows: Iterable[StepComparison]) -> Inside:
    """Counts the steps inside their intervals: the one count that tables, figures and texts quote."""
    done = [row for row in rows if row.step.is_within is not None]
    judged = [row for row in done if not row.used_in_intervals]
    return Inside(sum(bool(row.step.is_within) for row in judged), len(judged), len(done) - len(judged))


@dataclass(frozen=True)
class MethodErrors:
    """The errors of step time by one method; `sets` holds those of "all", "device-bound" and "host-bound" steps."""

    method: str
    n: int
    sets: Mapping[str, Errors]

    @property
    def label(self) -> str:
        """The method in words."""
        name = self.method.removesuffix(CALIBRATED)
        return METHOD_LABELS[name] + (", one factor" if name != self.method else "")

    def to_json(self) -> dict[str, Any]:
        errors = {f"{name}_{what}": value for name, found in self.sets.items() for what, value in vars(found).items()}
        return {"method": self.method, "label": self.label, "n": self.n, **errors}


def compare_methods(rows: Sequence[StepComparison]) -> list[MethodErrors]:
    """Errors of step time by method, this forecast first, over the steps that every method has an estimate of; each
    other method also with one factor, calibrated on the other models' steps (`baselines.calibrated`).

    Methods without an estimate of any step (torch's, where it was not run) are left out.
    """

    def part(row: StepComparison, method: str) -> Part:
        return row.step if method == "step" else row.baselines[method]

    others = [name for name in METHODS if any(part(row, name).error is not None for row in rows)]
    done = [row for row in rows if all(part(row, name).error is not None for name in ("step", *others))]
    if not done:
        return []
    sets = by_bound(done)
    found = {
        "step": {label: errors_of(row.step for row in members) for label, members in sets.items()},
        **{
            name: {label: errors_of(part(row, name) for row in members) for label, members in sets.items()}
            for name in others
        },
        **{
            f"{name}{CALIBRATED}": {label: errors_of(calibrated(members, name)) for label, members in sets.items()}
            for name in others
        },
    }
    return [MethodErrors(name, len(done), errors) for name, errors in found.items() if errors["all"].n]
