"""What a projection says of a card before that card is measured: forecasts to be committed first, judged afterwards.

    python -m studies.projection.ahead nvidia-h100-sxm --out reports/projection

writes OUT/<gpu>/forecasts.csv.gz, a row a number: each kernel of the suites named in `SUITES`, each ceiling of the
profile, and each real step of `validate`: the step on the host of the profile that was projected from, its device
time, and that of each group of operations. `measured.py` holds them against measurements.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Shape
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records.rows import StepRow, merged
from flopcast.roofline.base.csv_files import format_cell
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.library.profiles import projection
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.validation.compare_steps import compare
from flopcast.roofline.validation.step_plans import validation_plans
from studies.command import parser_of

SUITES = ("standard", "fused")
FILE = "forecasts.csv.gz"
# `kind`: "kernel", "ceiling", "step", "device", or "device/<group of operations>". `value`: seconds, of a ceiling what
# it counts; low and high are the ends of the 90% interval, empty where none is stated.
COLUMNS = ("kind", "key", "backend", "cache", "value", "low", "high")
Row = dict[str, Any]


def forecast_rows(
    profile: Profile, asked: Sequence[tuple[Shape, str, str]], plans: Iterable[Mapping[str, Any]]
) -> Iterator[Row]:
    """What a profile says of kernels (shape, backend, cache), of its ceilings and of steps (as their rows' `plan`)."""
    yield from kernel_rows(profile, asked)
    for key, number in profile.ceilings.items():
        yield {"kind": "ceiling", "key": key, "value": number.value, "low": number.low, "high": number.high}
    yield from step_rows(profile, plans)


def kernel_rows(profile: Profile, asked: Sequence[tuple[Shape, str, str]]) -> Iterator[Row]:
    """Seconds of each shape."""
    requests = [(describe(shape, backend), backend, cache) for shape, backend, cache in asked]
    for (shape, backend, cache), found in zip(asked, profile.estimate(requests), strict=True):
        wide = exp(Z_90 * found.sigma)
        yield {
            "kind": "kernel", "key": shape.key, "backend": backend, "cache": cache,
            "value": found.seconds, "low": found.seconds / wide, "high": found.seconds * wide,
        }  # fmt: skip


def step_rows(profile: Profile, plans: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Steps as if nobody had run them. One that cannot be forecast is left out."""
    unrun = [merged(StepRow, {"key": StepPlan(**plan).key, "plan": plan, "status": "not run"}) for plan in plans]
    for made, row in zip(unrun, compare(unrun, profile), strict=True):
        classes = {f"device/{group}": part for group, part in row.classes.items()}
        for kind, part in {"step": row.step, "device": row.device, **classes}.items():
            if part.forecast is not None:
                yield {"kind": kind, "key": made["key"], "value": part.forecast, "low": part.low, "high": part.high}


def ahead(profile: Profile) -> Iterator[Row]:
    """All that is said before a card is measured: of the suites' cases whatever their role, of every step."""
    cases = [case for name in SUITES for case in suites.load(name)]
    asked = [(case.shape, case.backend, case.cache) for case in cases]
    return forecast_rows(profile, asked, [asdict(plan) for plan in validation_plans("cuda")])


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Writes the rows, gzip, the same rows the same bytes; how many there were."""
    text, count = io.StringIO(), 0
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in rows:
        table.writerow([format_cell(row.get(name)) for name in COLUMNS])
        count += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))
    return count


def read(path: Path) -> list[Row]:
    """What `write` wrote, numbers as numbers."""
    rows = csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines())
    numbers = ("value", "low", "high")
    return [{**row, **{name: float(row[name]) if row[name] else None for name in numbers}} for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the forecasts of a GPU's projection."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("gpu")
    parser.add_argument("--out", type=Path, default=Path("reports/projection"))
    given = parser.parse_args(arguments)
    path = given.out / given.gpu / FILE
    if path.exists():
        raise UsageError(f"{path} exists: what was said ahead stays as it was said; take another --out")
    print(f"{path}: {write(path, ahead(projection(given.gpu)))} forecasts")


if __name__ == "__main__":
    main()
