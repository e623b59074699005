"""A projection judged by a card that was measured afterwards.

    python -m studies.projection.measured nvidia-h100-sxm --out reports/projection

holds two sets of forecasts against what `flopcast bench` and `flopcast validate` measured in REPORTS/<gpu> (folders
`measurements` and `steps`): "ahead", those of OUT/<gpu>/forecasts.csv.gz, written down before the card was measured
(`ahead.py`), and "today", what the projection says now - of a card that has been seen by then, so that only
the first are a test. Neither uses any measurement of the card, though its measured profile ships.

Writes into OUT/<gpu>: rows.csv.gz (every number), classes.csv (errors of kernels by class and cache, of steps by part),
ceilings.csv, steps.csv, ahead.png and README.md.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Shape, shape_from_json
from flopcast.microbench.records.rows import StepRow, select
from flopcast.roofline.base.csv_files import format_cell, write_rows
from flopcast.roofline.gpu.fit.cards import read_folder
from flopcast.roofline.gpu.fit.rows import ceilings_of
from flopcast.roofline.gpu.library.profiles import projection
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.validation.compare_steps import compare, read_steps, step_folders
from studies.command import parser_of
from studies.projection import ahead as projection_ahead
from studies.shipped.hosts import launching_anew

AHEAD, TODAY = "ahead", "today"
STAGES = (AHEAD, TODAY)
Row = dict[str, Any]
Key = tuple[str, str, str, str]  # kind, key, backend, cache
ROW_COLUMNS = (
    "kind", "group", "key", "backend", "cache", "measured",
    *(f"{stage}{end}" for stage in STAGES for end in ("", "_low", "_high", "_error", "_within")),
)  # fmt: skip
CLASS_COLUMNS = ("stage", "kind", "group", "backend", "cache", "rows", "median_error", "median_abs_error",
                 "p90_abs_error", "worst_error", "sum_error", "inside_90", "median_half_width")  # fmt: skip
CEILING_COLUMNS = ("name", "measured", "ahead", "ahead_low", "ahead_high", "ahead_error", "ahead_within", "today",
                   "today_error")  # fmt: skip
STEP_COLUMNS = (
    "name", "group", "batch", "seq", "precision", "optimizer", "fused", "bound", "step_seconds", "step_ahead",
    "step_low", "step_high", "step_error", "step_within", "device_seconds", "device_ahead", "device_low",
    "device_high", "device_error", "device_within", *(f"{group}_error" for group in GROUPS), "device_error_today",
    "step_error_today", "step_error_today_run_host", "step_within_today_run_host",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One number of the card. `group`: its class, or what steps it is of."""

    kind: str
    group: str
    key: str
    backend: str
    cache: str
    value: float

    @property
    def id(self) -> Key:
        return self.kind, self.key, self.backend, self.cache


@dataclass(frozen=True)
class Card:
    """What was measured of one GPU: kernels with their shapes, ceilings, and steps as `validate.compare` has them."""

    kernels: Sequence[tuple[Measured, Shape]]
    ceilings: Sequence[Measured]
    steps: Sequence[tuple[str, Row]]  # by the key of the step

    @property
    def numbers(self) -> list[Measured]:
        return [*(one for one, _ in self.kernels), *self.ceilings, *step_numbers(self.steps)]


def read_card(folder: Path, profile: Profile) -> Card:
    """The measurements and steps below `folder`, the steps compared with `profile`. Raises DataError as
    `cards.read_folder` does, UsageError where there are none."""
    found = read_folder(folder / "measurements")
    kernels = []
    for row in found.rows:
        if row["status"] == "ok" and (recorded := row.get("shape")) and (taken := row.get("taken_seconds")):
            shape, backend = shape_from_json(recorded), row.get("backend", "torch")
            op_class, cache = describe(shape, backend).op_class, row.get("cache", "cold")
            kernels.append((Measured("kernel", op_class, row["key"], backend, cache, taken), shape))
    if not kernels:
        raise UsageError(f"{folder / 'measurements'} holds no measured kernels: `flopcast bench` makes them")
    ceilings = ceilings_of(row for row in found.rows if row["status"] == "ok")
    return Card(
        kernels,
        [Measured("ceiling", "", name, "", "", number.value) for name, number in ceilings.items()],
        [pair for run in step_folders(folder / "steps") for pair in _steps_of(run, profile)],
    )


def _steps_of(run: Path, profile: Profile) -> Iterator[tuple[str, Row]]:
    rows = read_steps(run)
    plans = {row["key"]: row["plan"] for row in select(rows, StepRow)}
    for (key, plan), row in zip(plans.items(), compare(rows, profile), strict=True):
        if row.step.measured is not None:
            yield key, {**row.to_json(), "plan": plan}


def step_numbers(steps: Iterable[tuple[str, Row]]) -> Iterator[Measured]:
    """A step's seconds, its device's, and those of each group of operations."""
    for key, row in steps:
        for kind, name in _KINDS.items():
            value = row[f"{name}_seconds"]
            if value:
                yield Measured(kind, row["group"], key, "", "", float(value))


_KINDS = {"step": "step", "device": "device", **{f"device/{group}": group for group in GROUPS}}


def today(profile: Profile, card: Card) -> list[Row]:
    """What the profile says of everything that was measured."""
    asked = [(shape, one.backend, one.cache) for one, shape in card.kernels]
    return list(projection_ahead.forecast_rows(profile, asked, [row["plan"] for _, row in card.steps]))


def by_id(forecasts: Iterable[Row]) -> dict[Key, Row]:
    return {(row["kind"], row["key"], row.get("backend") or "", row.get("cache") or ""): row for row in forecasts}


def judge(measured: Iterable[Measured], stages: Mapping[str, Mapping[Key, Row]]) -> list[Row]:
    """A row a number that was forecast ahead: measured, forecast, signed error, whether inside the 90% interval."""
    rows = []
    for one in measured:
        row: Row = {**vars(one)}
        row["measured"] = row.pop("value")
        for stage, forecasts in stages.items():
            found = forecasts.get(one.id)
            if found is None or not one.value:
                continue
            low, high = found.get("low"), found.get("high")
            row |= {
                stage: found["value"],
                f"{stage}_low": low,
                f"{stage}_high": high,
                f"{stage}_error": found["value"] / one.value - 1.0,
                f"{stage}_within": None if low is None or high is None else low <= one.value <= high,
            }
        if AHEAD in row:
            rows.append(row)
    return rows


def classes(rows: Sequence[Row]) -> list[Row]:
    """Errors by stage, kind and class; of steps also over all groups. `sum_error`: of the sum of seconds, in which
    errors of opposite sign cancel; `median_half_width`: of the 90% intervals, over the forecast."""
    grouped: dict[tuple[str, str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "ceiling":
            continue
        for stage in STAGES:
            grouped[stage, row["kind"], row["group"], row["backend"], row["cache"]].append(row)
            if row["kind"] != "kernel":
                grouped[stage, row["kind"], "all", "", ""].append(row)
    order = {kind: i for i, kind in enumerate(("kernel", *_KINDS))}
    names = sorted(grouped, key=lambda name: (STAGES.index(name[0]), order[name[1]], name[2] != "all", name[2:]))
    return [{**dict(zip(CLASS_COLUMNS[:5], name, strict=True)), **errors(grouped[name], name[0])} for name in names]


def errors(rows: Sequence[Row], stage: str) -> Row:
    """Statistics of one stage's signed errors."""
    some = [row for row in rows if row.get(f"{stage}_error") is not None]
    if not some:
        return {"rows": 0}
    signed = np.array([row[f"{stage}_error"] for row in some])
    inside = [row[f"{stage}_within"] for row in some if row[f"{stage}_within"] is not None]
    widths = [log(row[f"{stage}_high"] / row[f"{stage}_low"]) / 2 for row in some if row[f"{stage}_low"]]
    total = sum(row["measured"] for row in some)
    return {
        "rows": len(some),
        "median_error": float(np.median(signed)),
        "median_abs_error": float(np.median(np.abs(signed))),
        "p90_abs_error": float(np.quantile(np.abs(signed), 0.9)),
        "worst_error": float(signed[np.argmax(np.abs(signed))]),
        "sum_error": sum(row[stage] for row in some) / total - 1.0,
        "inside_90": sum(inside) / len(inside) if inside else None,
        "median_half_width": float(np.expm1(np.median(widths))) if widths else None,
    }


def step_table(card: Card, rows: Sequence[Row]) -> list[Row]:
    """A row a step, by the columns of steps.csv."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["kind"] in _KINDS:
            found[row["key"]][_KINDS[row["kind"]]] = row
    table = []
    for key, step in card.steps:
        parts = found.get(key)
        if not parts or "device" not in parts:
            continue
        row = {name: step.get(name) for name in STEP_COLUMNS[:8]}
        for name in ("step", "device"):
            part = parts[name]
            row |= {
                f"{name}_seconds": part["measured"], f"{name}_ahead": part[AHEAD], f"{name}_low": part["ahead_low"],
                f"{name}_high": part["ahead_high"], f"{name}_error": part["ahead_error"],
                f"{name}_within": part["ahead_within"], f"{name}_error_today": part.get("today_error"),
            }  # fmt: skip
        row |= {f"{group}_error": parts[group]["ahead_error"] for group in GROUPS if group in parts}
        row["step_error_today_run_host"] = step["step_error"]
        row["step_within_today_run_host"] = step["within_interval"]
        table.append(row)
    return table


def write(out: Path, gpu: str, card: Card, rows: Sequence[Row], profile: Profile) -> None:
    """The folder's files."""
    from studies.projection import measured_report as report

    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(ROW_COLUMNS)
    table.writerows([format_cell(row.get(name)) for name in ROW_COLUMNS] for row in rows)
    (out / "rows.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))
    by_class, steps = classes(rows), step_table(card, rows)
    ceilings = [{**row, "name": row["key"]} for row in rows if row["kind"] == "ceiling"]
    write_rows(out / "classes.csv", CLASS_COLUMNS, by_class)
    write_rows(out / "ceilings.csv", CEILING_COLUMNS, ceilings)
    write_rows(out / "steps.csv", STEP_COLUMNS, steps)
    drawn = report.figure(rows, gpu)
    if drawn is not None:
        (out / f"{drawn.name}.png").write_bytes(drawn.png)
    (out / "README.md").write_text(report.page(gpu, profile, by_class, ceilings, steps, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Judges a GPU's projection by what was measured of it since."""
    from studies.projection.measured_report import headline

    parser = parser_of(__spec__, __doc__)
    parser.add_argument("gpu")
    parser.add_argument("--out", type=Path, default=Path("reports/projection"))
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="where <gpu>/measurements lies")
    given = parser.parse_args(arguments)
    out = given.out / given.gpu
    if not (out / projection_ahead.FILE).is_file():
        raise UsageError(
            f"{out / projection_ahead.FILE} does not exist: nothing was said ahead; `python -m "
            f"studies.projection.ahead {given.gpu}` writes it, before the card is measured"
        )
    profile = launching_anew(projection(given.gpu))  # as the card's steps ran
    card = read_card(given.reports / given.gpu, profile)
    ahead = by_id(projection_ahead.read(out / projection_ahead.FILE))
    rows = judge(card.numbers, {AHEAD: ahead, TODAY: by_id(today(profile, card))})
    write(out, given.gpu, card, rows, profile)
    for line in headline(classes(rows)):
        print(line)


if __name__ == "__main__":
    main()
