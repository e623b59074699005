"""Reads the rows of a folder of `flopcast bench` in the form in which two folders are compared. Does not use numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flopcast.kernels.shapes import shape_from_json
from flopcast.roofline.stream.lowering.describe import describe


@dataclass(frozen=True)
class MeasuredRow:
    """One measurement: of a kernel (`op_class` is its class), or of a scalar, i.e. a ceiling or a host cost ("scalar").

    For a kernel, `timer`, `profiler` and `profile` are seconds: as timed (graph replay, events, wall clock), as the sum
    of the profiler's kernels, and as a profile takes them from the two (`row_seconds.taken_seconds`). For a scalar,
    `timer` is its value, in the unit of that scalar.
    """

    key: str
    backend: str
    cache: str
    op_class: str
    role: str | None
    status: str
    timer: float | None
    profiler: float | None
    profile: float | None
    samples: Sequence[float]
    throttled: bool | None
    clock_mhz: float | None

    @property
    def is_scalar(self) -> bool:
        return self.op_class == SCALAR

    @property
    def id(self) -> str:
        """An identifier that is equal for the same measurement in two runs."""
        return f"{self.key}/{self.backend}/{self.cache}"


SCALAR = "scalar"


def measured_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, MeasuredRow]:
    """The rows that `cards.read_folder` read, by id; the last of several with the same id."""
    return {row.id: row for row in map(_measured_row, rows)}


def _measured_row(row: Mapping[str, Any]) -> MeasuredRow:
    backend, is_scalar = row.get("backend", "torch"), not row.get("shape")
    return MeasuredRow(
        key=row["key"],
        backend=backend,
        cache=row.get("cache", "cold"),
        op_class=SCALAR if is_scalar else _class_of(row["shape"], backend),
        role=row.get("role"),
        status=row["status"],
        timer=row.get("value") if is_scalar else row.get("seconds"),
        profiler=row.get("kernel_seconds"),
        profile=row.get("taken_seconds"),
        samples=row.get("samples") or (),
        throttled=row.get("throttled"),
        clock_mhz=row.get("clock_mhz"),
    )


def _class_of(shape: dict[str, Any], backend: str) -> str:
    try:
        return describe(shape_from_json(shape), backend).op_class
    except (KeyError, TypeError, ValueError, IndexError):
        return "unknown"
