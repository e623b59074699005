"""Reads the tables of `studies.widths.check` beside a page: real steps of aligned and unaligned sizes with their
forecasts."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

TABLES = ("widths.csv", "widths-2.csv", "widths-3.csv")  # one for each set of steps
NEAR = 0.015  # share of the aligned step by which a forecast penalty may be off


@dataclass(frozen=True, kw_only=True)
class SizeCheck:
    """An unaligned size with its forecast and its measured penalty: 0.1 means that the kernels of the step take 10%
    longer than interpolated between its aligned neighbours (`below`, `above`). `penalty_spread`: standard error of the
    measured penalty, from repetitions."""

    set: str = "1"
    neighbourhood: str
    axis: str
    value: int
    multiple: int  # the largest power of two that divides the size
    below: int
    above: int
    penalty_forecast: float
    penalty_low: float
    penalty_high: float
    penalty_measured: float
    penalty_error: float
    penalty_spread: float | None = None

    @property
    def time_error(self) -> float:
        return (1 + self.penalty_forecast) / (1 + self.penalty_measured) - 1

    @property
    def is_within(self) -> bool:
        return self.penalty_low <= self.penalty_measured <= self.penalty_high

    @property
    def is_near(self) -> bool:
        return abs(self.penalty_error) <= NEAR


@dataclass(frozen=True, kw_only=True)
class ShapeCheck:
    """A model among others with equal numbers of parameters: its rank by forecast and as measured (1: the fastest)."""

    set: str = "1"
    rank_forecast: int
    rank_measured: int
    width: int
    depth: int
    ffn: int
    vocab: int
    n_params: int
    step_forecast: float
    step_seconds: float
    step_error: float
    slower_than_best: float


@dataclass(frozen=True)
class WidthChecks:
    """The checks of all sets, the newest first."""

    sizes: tuple[SizeCheck, ...] = ()
    shapes: tuple[ShapeCheck, ...] = ()


def read_checks(folder: Path) -> WidthChecks:
    """Reads the checks from those of TABLES that are in `folder`."""
    sizes: list[SizeCheck] = []
    shapes: list[ShapeCheck] = []
    for path in (folder / name for name in reversed(TABLES)):
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    if row["axis"] == "shape":
                        shapes += _parsed(ShapeCheck, row)
                    else:
                        sizes += _parsed(SizeCheck, row)
    return WidthChecks(tuple(sizes), tuple(shapes))


Check = TypeVar("Check", SizeCheck, ShapeCheck)
_PARSE: Mapping[str, type[Any]] = {"str": str, "int": int, "float": float, "float | None": float}


def _parsed(kind: type[Check], row: Mapping[str, str]) -> list[Check]:
    """The row as a check; empty if it lacks a value that a check needs."""
    given = {f.name: _PARSE[str(f.type)](row[f.name]) for f in fields(kind) if row.get(f.name)}
    is_whole = all(f.name in given for f in fields(kind) if f.default is MISSING)
    return [kind(**given)] if is_whole else []
