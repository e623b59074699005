"""Compares two runs of a suite row by row, to tell how repeatable measurements are (`flopcast fit A --repeat B`).

Three times of a kernel are compared: the timer's, the profiler's, and the one that a profile takes from the two. A
difference is |b / a - 1|; rows count as short below 50 us in the first run and as long from there on: graph replay
dominates the differences of short rows, clocks those of long ones. The gap between the kernels of a graph is 0.2 us
wider in a process that has trained (1.13 us per tiny kernel against 0.93, one H200): the timer's time of a short row
shows it, the profile's does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from flopcast.errors import DataError
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.validation.measured_rows import MeasuredRow, measured_rows

LONG_SECONDS = 50e-6
# Limits on the median differences of two runs of the standard suite on one H200.
TARGETS = {"long": 0.01, "short": 0.03}
TIMES = ("timer", "profiler", "profile")  # of `MeasuredRow`


@dataclass(frozen=True)
class Pair:
    """The same measurement in two runs; None for the run that lacks it."""

    a: MeasuredRow | None
    b: MeasuredRow | None

    @property
    def row(self) -> MeasuredRow:
        """The row that gives the identity, class and role of both."""
        row = self.a or self.b
        assert row is not None
        return row

    @property
    def reason(self) -> str | None:
        """Why the two cannot be compared; None where they can."""
        for row, which in ((self.a, "first"), (self.b, "second")):
            if row is None or row.status != "ok":
                return f"{'not' if row is None else row.status} in the {which} run"
        return None

    @property
    def length(self) -> str | None:
        """Returns "long" or "short", by the first run; None for a scalar, and where the first run has no time."""
        seconds = self.a and (self.a.timer or self.a.profiler)
        if not seconds or self.row.is_scalar:
            return None
        return "long" if seconds >= LONG_SECONDS else "short"

    def difference(self, time: str) -> float | None:
        """b / a - 1 by one of TIMES; None where either is missing."""
        if self.reason:
            return None
        a, b = getattr(self.a, time), getattr(self.b, time)
        return b / a - 1.0 if a and b else None

    def to_json(self) -> dict[str, Any]:
        """A line of repeatability.csv."""
        row = self.row
        cells: dict[str, Any] = {
            "key": row.key, "backend": row.backend, "cache": row.cache, "class": row.op_class, "role": row.role,
            "length": self.length,
        }  # fmt: skip
        for time, prefix in zip(TIMES, ("", "kernel_", "profile_"), strict=True):
            for run, one in (("a", self.a), ("b", self.b)):
                cells[f"{prefix}seconds_{run}"] = getattr(one, time, None)
            cells[f"{prefix}difference"] = self.difference(time)
        for name in ("throttled", "clock_mhz"):
            cells |= {f"{name}_{run}": getattr(one, name, None) for run, one in (("a", self.a), ("b", self.b))}
        return {**cells, "reason": self.reason}


@dataclass(frozen=True)
class Agreement:
    """|difference| over a group of rows in one of TIMES: median, 90th percentile, maximum, and the signed median."""

    group: str  # "all", a class, or "scalars"
    length: str  # "long", "short" or "any"
    reading: str  # one of TIMES, or "value" of scalars
    n: int
    median: float
    p90: float
    greatest: float
    signed: float


@dataclass(frozen=True)
class Repeatability:
    """Two runs compared: a pair for each measurement of either, kernels before scalars.

    `wall_seconds` of each run are those from the first row written to the last. `machines` are the machines' ids: where
    they differ, cards or stacks are compared and not runs. `unmatched` counts the kernels that were not compared, by
    reason.
    """

    pairs: Sequence[Pair]
    agreements: Sequence[Agreement]
    wall_seconds: tuple[float | None, float | None]
    machines: tuple[str, str]
    unmatched: Mapping[str, int]

    @property
    def targets(self) -> dict[str, bool | None]:
        """Whether the median differences of a profile's times are within TARGETS; None where there are no such rows."""
        found = {a.length: a.median for a in self.agreements if a.group == "all" and a.reading == "profile"}
        return {name: found[name] <= most if name in found else None for name, most in TARGETS.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "machines": self.machines, "wall_seconds": self.wall_seconds, "unmatched": self.unmatched,
            "targets": self.targets, "agreements": [asdict(agreement) for agreement in self.agreements],
        }  # fmt: skip


def compare_folders(a: Path, b: Path) -> Repeatability:
    """Compares two folders of measurements row by row.

    Raises DataError as `cards.read_folder` does, and if the two have no row in common.
    """
    found = read_folder(a), read_folder(b)
    first, second = (measured_rows(one.rows) for one in found)
    pairs = [Pair(first.get(key), second.get(key)) for key in dict.fromkeys([*first, *second])]
    kernels = [pair for pair in pairs if not pair.row.is_scalar]
    scalars = [pair for pair in pairs if pair.row.key.startswith("scalar/")]  # host costs differ by a quarter
    if not any(pair.difference("timer") is not None for pair in kernels):
        raise DataError(f"{a} and {b} have no measured row in common: two runs of one suite are compared")
    return Repeatability(
        pairs=[*kernels, *scalars],
        agreements=_agreements(kernels, scalars),
        wall_seconds=(_wall_seconds(found[0].rows), _wall_seconds(found[1].rows)),
        machines=(str(found[0].machine["machine"]), str(found[1].machine["machine"])),
        unmatched=Counter(pair.reason for pair in kernels if pair.reason),
    )


def _agreements(kernels: Sequence[Pair], scalars: Sequence[Pair]) -> list[Agreement]:
    """Agreement of all kernels, then of each class, for long and short rows and each of TIMES; then of the scalars."""
    found = [
        _agreement(
            group,
            length,
            time,
            [p.difference(time) for p in kernels if group in ("all", p.row.op_class) and p.length == length],
        )
        for group in ("all", *sorted({pair.row.op_class for pair in kernels}))
        for length in ("long", "short")
        for time in TIMES
    ]
    found.append(_agreement("scalars", "any", "value", [pair.difference("timer") for pair in scalars]))
    return [agreement for agreement in found if agreement is not None]


def _agreement(group: str, length: str, reading: str, values: Sequence[float | None]) -> Agreement | None:
    signed = np.array([value for value in values if value is not None])
    if not len(signed):
        return None
    size = np.abs(signed)
    median, p90 = (float(q) for q in np.quantile(size, [0.5, 0.9]))
    return Agreement(group, length, reading, len(signed), median, p90, float(size.max()), float(np.median(signed)))


def _wall_seconds(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Seconds from the first row written to the last; None with fewer than two time stamps."""
    times = sorted(datetime.fromisoformat(row["time"]) for row in rows if row.get("time"))
    return (times[-1] - times[0]).total_seconds() if len(times) > 1 else None


def write_csv(found: Repeatability, path: Path) -> None:
    """Writes one line per pair. Raises UsageError if the file cannot be written."""
    lines = [pair.to_json() for pair in found.pairs]
    write_rows(path, list(lines[0]), lines)
