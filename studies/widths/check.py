"""Forecast penalties of widths against real steps: the table that says how far off they were.

Aligned and unaligned sizes side by side (`sets.py`). A penalty is held against the line between the aligned
neighbours (`penalties.penalty`). Shapes of equal parameters follow: whether the recommended one is the fastest.

    python -m studies.widths.check --set 3 --out widths-3.csv                                before: forecasts
    python -m studies.widths.check --forecasts widths-3.csv --steps DIR --out widths-3.csv   after: judged
    python -m studies.widths.check --steps DIR --out widths.csv         today's profile beside the same steps

The first is written, and committed, before anything of it was measured; the second leaves its forecasts as they are.

What a measurement allows for. Kernels' seconds of a width are the median of three profiled steps; the aligned ones,
ends of all lines, are built and measured twice, far apart in a shuffled order, and a width's own are taken to repeat as
those of its neighbourhood do. A penalty's standard error (`penalty_spread`) follows; where a penalty is 200%, 0.3% of
the step is a point. So errors are also given relative to the step (`time_error`): of a penalty of 100 to 200%, 1.5
points are 0.5 to 0.75% of the time.

H200, torch 2.11, forecasts of before, within 1.5 points: set 1 (2026-11-21, 6fba1b3) 16 of 32 widths, all 13 multiples
of 8 to 32, 3 of 8 of 2 and 4, no odd one of 11; set 2 (2026-11-22, f186338, by the law of unaligned products that set
1 asked for) 28 of 46, 19 of 19, 3 of 15, 6 of 12, by the law of before (648f0e9) 24; set 3 (2026-11-22, 14b7283, by
how far rows lie from 512 bytes) 42 of 55, 22 of 22 (median 0.19 points), 14 of 22 (0.98), 6 of 11 (1.24; the worst
11.8, of 231%, 3.6% of the time); signs 52 of 55 right, the three wrong ones of penalties of 0.1 points; 51 within
their 90% interval; all six shapes of each set ranked right. The measured penalties' standard error is 0.08 points at
the median, so it is the forecast that is off, by products (`products.py`): 2 to 3% a single one, which a step
of few different ones does not average away. reports/nvidia-h200/width-steps/README.md has the parts. Element-wise
kernels, norms, attention and the optimizer lose nothing at any width. Steps lose less than their kernels, since the
host shows beside them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from statistics import mean, median
from typing import Any

from flopcast.microbench.records import records
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.classes import group_of, op_class
from flopcast.roofline.stream.model.models import Config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.widths import penalties
from flopcast.roofline.widths import shapes as widths_shapes
from flopcast.roofline.widths.penalties import Point, neighbours
from studies.command import parser_of
from studies.widths.sets import REPEAT, SETS, SHAPE_PREFIX, SHAPES, CheckSet, Neighbourhood, plan_of

Row = dict[str, Any]

GOAL_POINTS, GOAL_SIGN, GOAL_SHAPE = 0.015, 0.9, 0.01
KINDS = {"8, 16, 32": (8, 16, 32), "2, 4": (2, 4), "odd": (1,)}

_FORECAST = (
    "set", "neighbourhood", "axis", "value", "multiple", "below", "above", "width", "depth", "heads", "kv_heads",
    "head_dim", "ffn", "vocab", "batch", "seq", "n_params", "profile", "step_forecast", "step_low", "step_high",
    "device_forecast", "device_low", "device_high", "gemm_forecast", "penalty_forecast", "penalty_low", "penalty_high",
    "step_penalty_forecast", "rank_forecast",
)  # fmt: skip
_MEASURED = (
    "status", "runs", "step_seconds", "step_error", "step_spread", "device_runs", "device_seconds", "device_error",
    "device_spread", "gemm_seconds", "penalty_measured", "penalty_spread", "penalty_error", "gemm_error", "time_error",
    "right_sign", "within_interval", "step_penalty_measured", "step_penalty_spread", "step_penalty_error",
    "rank_measured", "slower_than_best",
)  # fmt: skip
COLUMNS = (*_FORECAST, *_MEASURED)
_WORDS = ("neighbourhood", "axis", "profile", "status")


@dataclass(frozen=True)
class Measured:
    """One run's seconds by name of the plan without the repetition's mark: of steps, of their kernels (each
    measurement's profiled steps), and of products alone (of the last profiled step)."""

    step: Mapping[str, Sequence[float]]
    device: Mapping[str, Sequence[Sequence[float]]]
    gemm: Mapping[str, Sequence[float]]
    status: Mapping[str, str]
    shapes: Sequence[Config] = ()


def rows_in(folder: Path) -> list[Sequence[Mapping[str, Any]]]:
    """The rows of each run in a folder: its own, or those of the folders in it, in order of name (several cards, the
    same steps again). Raises DataError as `records.read` does."""
    own = records.file_in(folder).is_file()
    parts = [] if own else sorted(path.parent for path in folder.glob(f"*/{records.MACHINE}"))
    return [records.read(part).rows for part in parts or [folder]]


def measured_of(rows: Iterable[Mapping[str, Any]]) -> Measured:
    """From the rows that one run of `studies/widths/steps.py` wrote."""
    step: dict[str, list[float]] = {}
    device: dict[str, list[list[float]]] = {}
    gemm: dict[str, list[float]] = {}
    status: dict[str, str] = {}
    configs = []
    for row in rows:
        name = (row.get("plan") or {}).get("name")
        if name is None:
            continue
        own = name.removesuffix(REPEAT)
        is_step = row["key"].startswith("step/")
        if is_step and name.startswith(SHAPE_PREFIX) and name == own:
            configs.append(row["plan"]["config"])
        if is_step:
            status[own] = row["status"] if status.get(own, "ok") == "ok" else status[own]
        if row["status"] != "ok":
            continue
        if is_step:
            step.setdefault(own, []).append(float(row["value"]))
        elif row["key"].startswith("step_kernels/"):
            samples = [float(sample) for sample in row.get("samples") or [row["value"]]]
            device.setdefault(own, []).append(samples)
            calls = row.get("ops") or {}
            products = [seconds for op, (seconds, _) in calls.items() if group_of(op_class(op)) == "gemm"]
            gemm.setdefault(own, []).append(sum(products))
    return Measured(step, device, gemm, status, configs)


def shapes_of(runs: Iterable[Measured]) -> Sequence[Config]:
    """The shapes that were run, chosen before, whatever a profile says now; none where none was."""
    return next((run.shapes for run in runs if run.shapes), ())


# --- forecasts


def forecasts(chosen: CheckSet, profile: Profile, shapes: Sequence[Config] = ()) -> list[Row]:
    """One row a width, neighbourhood by neighbourhood, then the shapes: `shapes`, else those the profile picks now."""
    found: list[Row] = []
    for place in chosen.neighbourhoods:
        found += _neighbourhood(place, profile)
    ranked = widths_shapes.survey_shapes(shapes, chosen.run, profile) if shapes else chosen.shapes(profile)
    for rank, one in enumerate(ranked):
        found.append({**_row(SHAPES, one, chosen.run), "rank_forecast": rank + 1})
    named = f"{profile.gpu} of {profile.provenance.get('to', 'no date')}"
    return [{**row, "set": chosen.number, "profile": named} for row in found]


def _neighbourhood(place: Neighbourhood, profile: Profile) -> list[Row]:
    asked = ((value, place.config_of(value)) for value in place.values)
    points = {p.value: p for p in penalties.survey(place.axis, asked, place.run, profile)}
    rows = {value: _row(place.name, one, place.run) for value, one in points.items()}
    for value in place.unaligned:
        below, above = neighbours(value, penalties.ALIGNED)
        forecast = penalties.penalty(points[value], points[below], points[above])
        rows[value] |= {
            "below": below, "above": above, "penalty_forecast": forecast.device, "penalty_low": forecast.device_low,
            "penalty_high": forecast.device_high, "step_penalty_forecast": forecast.step,
        }  # fmt: skip
    return list(rows.values())


def _row(group: str, one: Point, run: Run) -> Row:
    config = one.config
    return {
        **dict.fromkeys(COLUMNS),
        "neighbourhood": group, "axis": one.axis, "value": one.value, "multiple": one.multiple,
        "width": config["hidden_size"], "depth": config["num_hidden_layers"],
        "heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"], "ffn": config["intermediate_size"], "vocab": config["vocab_size"],
        "batch": run.batch, "seq": run.seq, "n_params": one.n_params,
        "step_forecast": one.step_seconds, "step_low": one.step_seconds_low, "step_high": one.step_seconds_high,
        "device_forecast": one.device_seconds, "device_low": one.device_seconds_low,
        "device_high": one.device_seconds_high, "gemm_forecast": sum(one.layout_seconds.values()),
    }  # fmt: skip


def read_table(path: Path) -> list[Row]:
    """Forecasts of a table written before; what was measured then is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        {**dict.fromkeys(COLUMNS), **{name: _read(name, row.get(name) or "") for name in _FORECAST}} for row in rows
    ]


def _read(name: str, text: str) -> Any:
    if name in _WORDS or not text:
        return text or None
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value


# --- what was measured


def judged(rows: Sequence[Row], runs: Sequence[Measured]) -> list[Row]:
    """The rows of forecasts with what `runs` measured. A step that failed, or never ran, keeps its row and says so.

    Measured seconds are means over runs and repetitions (of kernels of medians over the profiled steps), penalties of
    these; `..._spread` is the standard deviation of one such value, pooled over a neighbourhood's repetitions; of
    kernels that none was repeated of, over the profiled steps, which do not know what differs from one build of a model
    to the next. `penalty_error` is forecast less measured, 0.01 is a point; `gemm_error` the part of it that products
    make, `time_error` relative to the step's kernels. All of the kernels' seconds, `step_...` of the step's.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["neighbourhood"], []).append({**row, **_own(row, runs)})
    for name, group in found.items():
        plans = [plan_of(row).name for row in group]
        step_spread = _pooled([run.step.get(plan, ()) for run in runs for plan in plans])
        builds = [[median(samples) for samples in run.device.get(plan, ())] for run in runs for plan in plans]
        device_spread = _pooled(builds)
        known = {row["value"]: row for row in group}
        for row in group:
            row["step_spread"] = step_spread
            row["device_spread"] = row["device_spread"] if device_spread is None else device_spread
        if name == SHAPES:
            _rank(group)
            continue
        for row in group:
            if row["penalty_forecast"] is not None:
                _judge(row, known[row["below"]], known[row["above"]])
    return [row for group in found.values() for row in group]


def _own(row: Row, runs: Sequence[Measured]) -> Row:
    """What was measured of the row's own step."""
    name = plan_of(row).name
    steps = [value for m in runs for value in m.step.get(name, ())]
    samples = [found for m in runs for found in m.device.get(name, ())]
    gemms = [value for m in runs for value in m.gemm.get(name, ())]
    step, gemm = (mean(values) if values else None for values in (steps, gemms))
    device = mean(map(median, samples)) if samples else None
    status = [run.status[name] for run in runs if name in run.status]
    return {
        "status": next((s for s in status if s != "ok"), "ok") if status else "forecast only",
        "runs": len(steps), "step_seconds": step, "step_error": step and row["step_forecast"] / step - 1,
        "device_seconds": device, "device_error": device and row["device_forecast"] / device - 1,
        "device_runs": len(samples), "device_spread": _pooled(samples), "gemm_seconds": gemm,
    }  # fmt: skip


def _pooled(groups: Iterable[Sequence[float]]) -> float | None:
    """Relative standard deviation within groups of repeated values; None where nothing was repeated."""
    repeated = [group for group in groups if len(group) > 1]
    squares = [((value / mean(group)) - 1) ** 2 for group in repeated for value in group]
    degrees = sum(len(group) - 1 for group in repeated)
    return float((sum(squares) / degrees) ** 0.5) if degrees else None


def _judge(row: Row, below: Row, above: Row) -> None:
    """Adds the measured penalty and how far the forecast was off it."""
    share = (row["value"] - below["value"]) / (above["value"] - below["value"])
    for prefix, of in (("", "device"), ("step_", "step")):
        own, *ends = (r[f"{of}_seconds"] for r in (row, below, above))
        if own is None or None in ends:
            continue
        actual = own / _line(ends, share) - 1
        row[f"{prefix}penalty_measured"] = actual
        row[f"{prefix}penalty_error"] = row[f"{prefix}penalty_forecast"] - actual
        spreads = [r[f"{of}_spread"] for r in (row, below, above)]
        if None not in spreads:
            counts = [r["runs" if prefix else "device_runs"] for r in (row, below, above)]
            parts = [spread / count**0.5 for spread, count in zip(spreads, counts, strict=True)]
            row[f"{prefix}penalty_spread"] = (1 + actual) * hypot(parts[0], (1 - share) * parts[1], share * parts[2])
    if row["penalty_measured"] is None:
        return
    row["time_error"] = (1 + row["penalty_forecast"]) / (1 + row["penalty_measured"]) - 1
    row["right_sign"] = (row["penalty_forecast"] > 0) == (row["penalty_measured"] > 0)
    row["within_interval"] = row["penalty_low"] <= row["penalty_measured"] <= row["penalty_high"]
    if None not in (row["gemm_forecast"], row["gemm_seconds"], below["gemm_seconds"], above["gemm_seconds"]):
        excess = [
            (row[gemm] - _line((below[gemm], above[gemm]), share)) / _line((below[device], above[device]), share)
            for gemm, device in (("gemm_forecast", "device_forecast"), ("gemm_seconds", "device_seconds"))
        ]
        row["gemm_error"] = excess[0] - excess[1]


def _line(ends: Sequence[float], share: float) -> float:
    return ends[0] * (1 - share) + ends[1] * share


def _rank(rows: Sequence[Row]) -> None:
    known = [row for row in rows if row["step_seconds"]]
    for rank, row in enumerate(sorted(known, key=_per_parameter)):
        row["rank_measured"] = rank + 1
        row["slower_than_best"] = _per_parameter(row) / min(map(_per_parameter, known)) - 1


def _per_parameter(row: Row) -> float:
    return float(row["step_seconds"] / row["n_params"])


# --- the sum of it


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What the goals ask: penalties within 1.5 points, right signs, the recommended shape against the best. `kinds`:
    the same for multiples of 8 and more, of 2 and 4, and odd sizes, whose penalties are of other orders."""
    judged = [row for row in rows if row["penalty_error"] is not None]
    if not judged:
        return {"judged": 0}
    stepped = [row for row in rows if row["step_penalty_error"] is not None]
    best = [row["slower_than_best"] for row in rows if row["rank_forecast"] == 1]
    return {
        **_judged(judged),
        "right_sign": mean(row["right_sign"] for row in judged),
        "within_interval": mean(row["within_interval"] for row in judged),
        "device_error": median(abs(row["device_error"]) for row in rows if row["device_error"] is not None),
        "kinds": {
            kind: _judged(mine)
            for kind, multiples in KINDS.items()
            if (mine := [row for row in judged if row["multiple"] in multiples])
        },
        "step": {
            "within_goal": mean(abs(row["step_penalty_error"]) <= GOAL_POINTS for row in stepped),
            "median_points": median(abs(row["step_penalty_error"]) for row in stepped),
            "right_sign": mean(
                (row["step_penalty_forecast"] > 0) == (row["step_penalty_measured"] > 0) for row in stepped
            ),
            "spread_points": median(row["step_penalty_spread"] or 0.0 for row in stepped),
        }
        if stepped
        else None,
        "recommended_slower_than_best": best[0] if best else None,
    }


def _judged(rows: Sequence[Row]) -> dict[str, Any]:
    """`within_noise`: within 1.5 points and two standard errors of the measured penalty."""
    errors = [abs(row["penalty_error"]) for row in rows]
    spreads = [row["penalty_spread"] or 0.0 for row in rows]
    of_time = [abs(row["time_error"]) for row in rows]
    of_gemms = [abs(row["gemm_error"]) for row in rows if row["gemm_error"] is not None]
    return {
        "judged": len(rows),
        "within_goal": mean(error <= GOAL_POINTS for error in errors),
        "within_noise": mean(error <= GOAL_POINTS + 2 * spread for error, spread in zip(errors, spreads, strict=True)),
        "median_points": median(errors),
        "worst_points": max(errors),
        "spread_points": median(spreads),
        "median_of_products": median(of_gemms) if of_gemms else None,
        "median_of_time": median(of_time),
        "worst_of_time": max(of_time),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the table; prints the summary."""
    import json

    from flopcast.roofline.gpu.library.profiles import find_profile

    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--set", type=int, choices=sorted(SETS), default=1, help="of widths")
    parser.add_argument("--forecasts", type=Path, help="table written before: its forecasts are judged")
    parser.add_argument("--steps", type=Path, action="append", default=[], help="folder of a run, or of several")
    parser.add_argument("--out", type=Path, default=Path("reports/nvidia-h200/widths.csv"))
    given = parser.parse_args(arguments)
    runs = [measured_of(rows) for folder in given.steps for rows in rows_in(folder)]
    if given.forecasts is None:
        rows = forecasts(SETS[given.set], find_profile(given.gpu), shapes_of(runs))
    else:
        rows = read_table(given.forecasts)
    rows = judged(rows, runs)
    write_rows(given.out, COLUMNS, rows)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
