"""Two runs of a suite, row by row: how far the same measurement is from itself.

    python -m flopcast.roofline.validation.repeatability A B [--json] [--out repeatability.csv]

A and B are folders of `flopcast bench` (or measurement files). Three readings are compared: the timer's (graph replay,
events, wall clock), the profiler's (sum of kernel durations), and what `fit` takes of the two for the profile. A
difference is |b / a - 1|; short rows and long ones are told apart at 50 us of the first run, where graph replay gives
way to clocks as what matters. The gap between the kernels of a graph is 0.2 us wider in a process that has trained
(1.13 us a tiny kernel for 0.93, one H200), which the timer's reading of a short row shows and the profile's does not.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flopcast.errors import DataError, UsageError
from flopcast.kernels.shapes import shape_from_json
from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.gpu.fit.row_seconds import graph_gap_of, taken_seconds
from flopcast.roofline.stream.lowering.describe import describe

LONG_SECONDS = 50e-6
# What two runs of the standard suite on one H200 are held to, medians.
TARGETS = {"long": 0.01, "short": 0.03}
COLUMNS = (
    "key", "backend", "cache", "class", "role", "length", "seconds_a", "seconds_b", "difference",
    "kernel_seconds_a", "kernel_seconds_b", "kernel_difference", "profile_seconds_a", "profile_seconds_b",
    "profile_difference", "throttled_a", "throttled_b", "clock_mhz_a",
    "clock_mhz_b", "reason",
)  # fmt: skip

READINGS = {"timer": "difference", "profiler": "kernel_difference", "profile": "profile_difference"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Agreement:
    """|difference| of a group of rows by one reading: median, 90th percentile, greatest, and the signed median."""

    group: str  # "all", a class, or "scalars"
    length: str  # "long", "short" or "any"
    reading: str  # "timer", "profiler", "profile" or "value"
    n: int
    median: float
    p90: float
    greatest: float
    signed: float


@dataclass(frozen=True)
class Repeatability:
    """`rows`: one a measurement of either run, the cells of COLUMNS. `wall_seconds`: from the first row written to the
    last, of each run. `machines`: their ids; where they differ, cards or stacks are compared and not runs."""

    rows: list[Row]
    agreements: list[Agreement]
    wall_seconds: tuple[float | None, float | None]
    machines: tuple[str, str]
    unmatched: dict[str, int]

    @property
    def targets(self) -> dict[str, bool | None]:
        """Whether the medians of what a profile takes keep to TARGETS; None where there are no such rows."""
        found = {a.length: a.median for a in self.agreements if a.group == "all" and a.reading == "profile"}
        return {name: found[name] <= most if name in found else None for name, most in TARGETS.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "machines": self.machines, "wall_seconds": self.wall_seconds, "unmatched": self.unmatched,
            "targets": self.targets, "agreements": [asdict(agreement) for agreement in self.agreements],
        }  # fmt: skip


def compare_folders(a: Path, b: Path) -> Repeatability:
    """Raises DataError as `cards.read_folder` does, and where the two have no row in common."""
    found = read_folder(a), read_folder(b)
    compared = compare(found[0].rows, found[1].rows)
    if not any(row["difference"] is not None for row in compared):
        raise DataError(f"{a} and {b} have no measured row in common: two runs of one suite are compared")
    scalars = compare(found[0].rows, found[1].rows, is_scalar=True)
    unmatched = Counter(row["reason"] for row in compared if row["reason"])
    first, second = (records_span(one.rows) for one in found)
    return Repeatability(
        rows=[*compared, *scalars],
        agreements=[*agreements(compared), *scalar_agreements(scalars)],
        wall_seconds=(first, second),
        machines=(str(found[0].machine["machine"]), str(found[1].machine["machine"])),
        unmatched=dict(unmatched),
    )


def compare(a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]], is_scalar: bool = False) -> list[Row]:
    """A row for each measurement of a shape (`is_scalar`: of a ceiling) in either run, in the order of the first."""

    def by_identity(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
        return {
            (row["key"], row.get("backend", "torch"), row.get("cache", "cold")): row
            for row in rows
            if (row["key"].startswith("scalar/") if is_scalar else row.get("shape"))
        }

    a, b = list(a), list(b)
    first, second = by_identity(a), by_identity(b)
    gaps = _gap(a), _gap(b)
    return [_compared(key, first.get(key), second.get(key), gaps) for key in dict.fromkeys([*first, *second])]


def _gap(rows: Iterable[Mapping[str, Any]]) -> float:
    gap = graph_gap_of([row for row in rows if row["status"] == "ok"])
    return 0.0 if gap is None else gap.value


def _compared(
    key: tuple[str, str, str], a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, gaps: tuple[float, float]
) -> Row:
    some: Mapping[str, Any] = a or b or {}
    row: Row = dict.fromkeys(COLUMNS)
    row |= {"key": key[0], "backend": key[1], "cache": key[2], "class": _class_of(some), "role": some.get("role")}
    row["reason"] = _unusable(a, "first") or _unusable(b, "second")
    for name, one, gap in (("a", a or {}, gaps[0]), ("b", b or {}, gaps[1])):
        is_scalar = not some.get("shape")
        if not is_scalar:
            row[f"profile_seconds_{name}"] = taken_seconds(one, row["class"], gap)
        row[f"seconds_{name}"] = one.get("value") if is_scalar else one.get("seconds")
        row[f"kernel_seconds_{name}"] = one.get("kernel_seconds")
        row[f"throttled_{name}"], row[f"clock_mhz_{name}"] = one.get("throttled"), one.get("clock_mhz")
    if not row["reason"]:
        row["difference"] = _difference(row["seconds_a"], row["seconds_b"])
        row["kernel_difference"] = _difference(row["kernel_seconds_a"], row["kernel_seconds_b"])
        row["profile_difference"] = _difference(row["profile_seconds_a"], row["profile_seconds_b"])
    length = row["seconds_a"] or row["kernel_seconds_a"]
    if length and some.get("shape"):
        row["length"] = "long" if length >= LONG_SECONDS else "short"
    return row


def _unusable(row: Mapping[str, Any] | None, which: str) -> str | None:
    if row is None:
        return f"not in the {which} run"
    return None if row["status"] == "ok" else f"{row['status']} in the {which} run"


def _class_of(row: Mapping[str, Any]) -> str:
    if not row.get("shape"):
        return "scalar"
    try:
        return describe(shape_from_json(row["shape"]), row.get("backend", "torch")).op_class
    except (KeyError, TypeError, ValueError, IndexError):
        return "unknown"


def _difference(a: float | None, b: float | None) -> float | None:
    return None if not a or not b else b / a - 1.0


def agreements(rows: Sequence[Mapping[str, Any]]) -> list[Agreement]:
    """Of all rows, then of each class; long and short ones apart, by each reading."""
    found = []
    for group in ("all", *sorted({str(row["class"]) for row in rows})):
        for length in ("long", "short"):
            members = [r for r in rows if group in ("all", r["class"]) and r["length"] == length]
            for reading, column in READINGS.items():
                one = _agreement(group, length, reading, [r[column] for r in members])
                found += [one] if one is not None else []
    return found


def scalar_agreements(rows: Sequence[Mapping[str, Any]]) -> list[Agreement]:
    one = _agreement("scalars", "any", "value", [row["difference"] for row in rows])
    return [] if one is None else [one]


def _agreement(group: str, length: str, reading: str, values: Sequence[float | None]) -> Agreement | None:
    signed = np.array([value for value in values if value is not None])
    if not len(signed):
        return None
    size = np.abs(signed)
    median, p90 = (float(q) for q in np.quantile(size, [0.5, 0.9]))
    return Agreement(group, length, reading, len(signed), median, p90, float(size.max()), float(np.median(signed)))


def records_span(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Seconds from the first row written to the last; None with fewer than two times."""
    from datetime import datetime

    times = sorted(datetime.fromisoformat(row["time"]) for row in rows if row.get("time"))
    return (times[-1] - times[0]).total_seconds() if len(times) > 1 else None


# --- out


def write_csv(found: Repeatability, path: Path) -> None:
    """Raises UsageError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({k: _cell(v) for k, v in row.items()} for row in found.rows)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}: give another --out") from error


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else value


TABLE_COLUMNS = ("rows", "length", "reading", "n", "median", "p90", "greatest", "signed median")


def table_rows(found: Repeatability) -> list[list[str]]:
    """Cells for the terminal."""
    lengths = {"long": ">= 50 us", "short": "< 50 us", "any": ""}
    return [
        [a.group, lengths[a.length], a.reading, f"{a.n:,}", f"{a.median:.2%}", f"{a.p90:.2%}", f"{a.greatest:.1%}",
         f"{a.signed:+.2%}"]
        for a in found.agreements
    ]  # fmt: skip


def remarks(found: Repeatability) -> list[str]:
    """What a person has to know besides the table."""
    said = []
    if found.machines[0] != found.machines[1]:
        said.append(
            f"machines {found.machines[0]} and {found.machines[1]}: these are two cards, power limits or stacks, "
            "not two runs of one"
        )
    said += [f"{count} rows {reason}" for reason, count in sorted(found.unmatched.items())]
    for name, held in found.targets.items():
        if held is not None:
            rows = "50 us and more" if name == "long" else "less than 50 us"
            verdict = f"{'within' if held else 'ABOVE'} {TARGETS[name]:.0%}"
            said.append(f"median of rows of {rows} {verdict}, by what the profile takes")
    walls = [f"{seconds:.0f} s" for seconds in found.wall_seconds if seconds is not None]
    return [*said, f"first row to last: {', '.join(walls)}"] if walls else said
