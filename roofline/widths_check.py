"""Forecast penalties of widths against real steps: which steps are run, and the table that says how far off it was.

Aligned and unaligned sizes side by side, in settings that the device bounds (thousands of tokens, fused AdamW, few
layers), so that a step costs tens of milliseconds and its penalty is the device's. A penalty is held against the line
between the aligned neighbours (`widths.penalty`); a second run of all, in another order, says how far a measured
penalty repeats. Shapes of equal parameters follow: whether the recommended one is the fastest.

    python -m flopcast.roofline.widths_check [--steps DIR ...] [--out widths.csv] [--gpu G]

Without `--steps` the table holds forecasts alone: written, and committed, before anything was measured.

2026-11-21, H200, torch 2.11, 32 unaligned widths, kernels: the 13 multiples of 8, 16 and 32 came within 0.9 points
(median 0.5), of 8 multiples of 2 and 4 three within 1.5 (the worst 18.6 points high, of 85), of 11 odd ones none (time
2.4% off at the median, penalties of 98 to 222%). What is off are products, not element-wise kernels, which lose nothing
at any width. Of multiples of 2 and 4: the law knows one speed for products with one operand off and with both; left out
one by one, the fitted ones with one width off are forecast 2 to 5% long and those with both 1 to 3% short, and suites
draw widths at 1 and 8 beside a multiple of 64, none at 2 and 4 (`benchmarks/width_gemms.py` does). Of odd vocabularies
(6 to 7% short at 151,643): the largest odd width measured is 38,911. Steps lose less than their kernels, since the host
shows beside them: here by 1.3 ms a step more than the profile's host.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from pathlib import Path
from statistics import mean, median
from typing import Any

from flopcast.microbench.plans import StepPlan
from flopcast.roofline import widths, widths_shapes
from flopcast.roofline.batch import write_rows
from flopcast.roofline.forecast import Run
from flopcast.roofline.models import Config, make_config
from flopcast.roofline.profile import Profile
from flopcast.roofline.widths import Point, changed, neighbours

Row = dict[str, Any]

GROUP = "widths"
REPEAT = "#2"  # ends the name of a second run
SHAPE_PREFIX = "shape-"
SEED = 7
GOAL_POINTS, GOAL_SIGN, GOAL_SHAPE = 0.015, 0.9, 0.01
CONSTRAINT = "params=600M±2%"
N_SHAPES = 6


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """Sizes of one axis around a width. `unaligned`: what is held against the line between its neighbours."""

    name: str
    axis: str
    config: Config
    batch: int
    seq: int
    unaligned: tuple[int, ...]

    @property
    def values(self) -> tuple[int, ...]:
        """The unaligned sizes and the multiples of 64 beside them."""
        ends = {end for value in self.unaligned for end in neighbours(value, widths.ALIGNED)}
        return tuple(sorted({*self.unaligned, *ends}))

    @property
    def run(self) -> Run:
        return Run(batch=self.batch, seq=self.seq, optimizer="adamw-fused")

    def plan(self, value: int) -> StepPlan:
        return StepPlan(
            name=f"{self.name}-{value}", config=changed(self.config, self.axis, value), batch=self.batch,
            seq=self.seq, optimizer="adamw-fused", group=GROUP,
        )  # fmt: skip


def _model(width: int, depth: int, heads: int, kv_heads: int, ffn: int, vocab: int = 32_768) -> Config:
    return make_config(width=width, depth=depth, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab)


NEIGHBOURHOODS = (
    Neighbourhood(
        name="hidden1024", axis="hidden", config=_model(1024, 4, 8, 4, 3072), batch=16, seq=1024,
        unaligned=(1000, 1023, 1025, 1026, 1032, 1056),
    ),
    Neighbourhood(
        name="hidden2048", axis="hidden", config=_model(2048, 2, 16, 8, 6144), batch=8, seq=1024,
        unaligned=(2040, 2047, 2049, 2052, 2064),
    ),
    Neighbourhood(
        name="hidden4096", axis="hidden", config=_model(4096, 2, 32, 8, 12_288), batch=4, seq=1024,
        unaligned=(4088, 4095, 4097, 4100, 4112),
    ),
    Neighbourhood(
        name="ffn8192", axis="ffn", config=_model(2048, 2, 16, 8, 8192), batch=8, seq=1024,
        unaligned=(8184, 8191, 8193, 8196, 8208, 8224),
    ),
    Neighbourhood(
        name="vocab50257", axis="vocab", config=_model(1024, 2, 8, 4, 3072, 50_257), batch=8, seq=1024,
        unaligned=(50_256, 50_257, 50_258, 50_260, 50_264),
    ),
    Neighbourhood(
        name="vocab151936", axis="vocab", config=_model(1024, 2, 8, 4, 3072, 151_936), batch=8, seq=1024,
        unaligned=(151_643, 151_646, 151_937, 151_940, 151_944),
    ),
)  # fmt: skip
SHAPES_BASE = make_config(width=1024, depth=28, heads=16, kv_heads=8, ffn=3072)  # Qwen3-0.6B
SHAPES_RUN = Run(batch=8, seq=1024, optimizer="adamw-fused")
SHAPES = "equal parameters"


def shapes(profile: Profile) -> list[Point]:
    """Shapes of `CONSTRAINT` around Qwen3-0.6B, fastest forecast first: the recommended one, the slowest, and what lies
    evenly between."""
    constraint = widths_shapes.parse_constraint(CONSTRAINT)
    configs = widths_shapes.candidates(SHAPES_BASE, constraint, per_width=2)
    kept = [c for c in configs if c["num_hidden_layers"] <= SHAPES_BASE["num_hidden_layers"]]
    found = widths_shapes.survey(kept, SHAPES_RUN, profile)
    return [found[round(i * (len(found) - 1) / (N_SHAPES - 1))] for i in range(N_SHAPES)]


def shape_plan(config: Config) -> StepPlan:
    size = f"{config['hidden_size']}x{config['num_hidden_layers']}x{config['intermediate_size']}"
    return StepPlan(
        name=f"{SHAPE_PREFIX}{size}", config=config, batch=SHAPES_RUN.batch, seq=SHAPES_RUN.seq,
        optimizer=SHAPES_RUN.optimizer, group=GROUP,
    )  # fmt: skip


def plans(rows: Iterable[Mapping[str, str]], seed: int = SEED) -> list[StepPlan]:
    """The steps of a table of forecasts, as read from CSV: shuffled, so that no neighbourhood has the card's clocks to
    itself, the aligned ones twice."""
    places = {place.name: place for place in NEIGHBOURHOODS}
    found = []
    for row in rows:
        if row["neighbourhood"] in places:
            place, value = places[row["neighbourhood"]], int(row["value"])
            plan = place.plan(value)
            if value not in place.unaligned:
                found.append(replace(plan, name=plan.name + REPEAT))
        else:
            width, depth, heads, kv_heads, ffn, vocab = (int(row[name]) for name in SIZES)
            shape = make_config(
                width=width, depth=depth, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab
            )
            plan = shape_plan(shape)
        found.append(plan)
    random.Random(seed).shuffle(found)
    return found


def are_kernels_wanted(plan: StepPlan) -> bool:
    """Whether a step's kernels are timed too: of repetitions and of shapes the step itself is what counts."""
    return not plan.name.endswith(REPEAT) and not plan.name.startswith(SHAPE_PREFIX)


# --- the table


SIZES = ("width", "depth", "heads", "kv_heads", "ffn", "vocab")
COLUMNS = (
    "neighbourhood", "axis", "value", "multiple", "below", "above", *SIZES, "batch", "seq", "n_params", "status",
    "runs", "step_forecast", "step_low", "step_high", "step_seconds", "step_error", "step_spread",
    "device_forecast", "device_low", "device_high", "device_seconds", "device_error", "device_spread",
    "penalty_forecast", "penalty_low", "penalty_high", "penalty_measured", "penalty_spread", "penalty_error",
    "right_sign", "within_interval",
    "step_penalty_forecast", "step_penalty_measured", "step_penalty_spread", "step_penalty_error",
    "rank_forecast", "rank_measured", "slower_than_best",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One run's seconds of steps (a step and its repetition) and of their kernels (each profiled step), by name of the
    plan without the repetition's mark."""

    step: Mapping[str, Sequence[float]]
    device: Mapping[str, Sequence[float]]
    status: Mapping[str, str]
    shapes: Sequence[Config] = ()


def measured_of(rows: Iterable[Mapping[str, Any]]) -> Measured:
    """From the rows that one run of `benchmarks/width_steps.py` wrote."""
    steps: dict[str, list[float]] = {}
    device: dict[str, list[float]] = {}
    status: dict[str, str] = {}
    configs = []
    for row in rows:
        name = (row.get("plan") or {}).get("name")
        if name is None:
            continue
        is_step = row["key"].startswith("step/")
        if is_step and name.startswith(SHAPE_PREFIX):
            configs.append(row["plan"]["config"])
        if is_step:
            status.setdefault(name, row["status"])
        if row["status"] != "ok":
            continue
        if is_step:
            steps.setdefault(name.removesuffix(REPEAT), []).append(float(row["value"]))
        elif row["key"].startswith("step_kernels/"):
            device[name] = [float(sample) for sample in row.get("samples") or [row["value"]]]
    return Measured(steps, device, status, configs)


def table(profile: Profile, runs: Sequence[Iterable[Mapping[str, Any]]] = ()) -> list[Row]:
    """One row a width, neighbourhood by neighbourhood, then the shapes; `runs`: the rows of each run of all steps.
    Without any the forecasts alone.

    Measured seconds are means (of kernels medians over a run's profiled steps), penalties of these; `..._spread` is the
    standard deviation of one such value: of steps by those that were repeated, neighbourhood by neighbourhood, of
    kernels by the profiled steps of a run, which do not know what differs from process to process. `penalty_error` is
    forecast less measured, 0.01 is a point; all of the kernels' seconds, `step_...` of the step's.
    """
    measured = [measured_of(rows) for rows in runs]
    found: list[Row] = []
    for place in NEIGHBOURHOODS:
        found += _neighbourhood(place, profile, measured)
    return found + _shapes(profile, measured)


def _neighbourhood(place: Neighbourhood, profile: Profile, runs: Sequence[Measured]) -> list[Row]:
    points = {p.value: p for p in widths.survey(place.config, place.axis, place.values, place.run, profile)}
    names = {value: place.plan(value).name for value in place.values}
    rows = {value: _row(place.name, one, names[value], place.run, runs) for value, one in points.items()}
    step_spread = _pooled([run.step[name] for run in runs for name in names.values() if name in run.step])
    for row in rows.values():
        row["step_spread"] = step_spread
    for value in place.unaligned:
        row, (below, above) = rows[value], neighbours(value, widths.ALIGNED)
        forecast = widths.penalty(points[value], points[below], points[above])
        row |= {
            "below": below, "above": above, "penalty_forecast": forecast.device, "penalty_low": forecast.device_low,
            "penalty_high": forecast.device_high, "step_penalty_forecast": forecast.step,
        }  # fmt: skip
        share = (value - below) / (above - below)
        for prefix, of in (("", "device"), ("step_", "step")):
            own, *ends = (rows[v][f"{of}_seconds"] for v in (value, below, above))
            if own is None or None in ends:
                continue
            actual = own / (ends[0] * (1 - share) + ends[1] * share) - 1
            row[f"{prefix}penalty_measured"] = actual
            row[f"{prefix}penalty_error"] = row[f"{prefix}penalty_forecast"] - actual
            spreads = [rows[v][f"{of}_spread"] for v in (value, below, above)]
            if None not in spreads:  # aligned steps are means of two
                each = 2**-0.5 if prefix else 1.0
                row[f"{prefix}penalty_spread"] = (1 + actual) * hypot(
                    spreads[0], each * (1 - share) * spreads[1], each * share * spreads[2]
                )
        if row["penalty_measured"] is not None:
            row["right_sign"] = (row["penalty_forecast"] > 0) == (row["penalty_measured"] > 0)
            row["within_interval"] = row["penalty_low"] <= row["penalty_measured"] <= row["penalty_high"]
    return list(rows.values())


def _pooled(groups: Sequence[Sequence[float]]) -> float | None:
    """Relative standard deviation within groups of repeated values; None where nothing was repeated."""
    squares = [((value / mean(group)) - 1) ** 2 for group in groups if len(group) > 1 for value in group]
    degrees = sum(len(group) - 1 for group in groups)
    return float((sum(squares) / degrees) ** 0.5) if degrees else None


def _row(group: str, one: Point, name: str, run: Run, runs: Sequence[Measured]) -> Row:
    config = one.config
    steps = [value for m in runs for value in m.step.get(name, ())]
    devices = [median(m.device[name]) for m in runs if name in m.device]
    step, device = (mean(found) if found else None for found in (steps, devices))
    return {
        **dict.fromkeys(COLUMNS),
        "neighbourhood": group, "axis": one.axis, "value": one.value, "multiple": one.multiple,
        "width": config["hidden_size"], "depth": config["num_hidden_layers"],
        "heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"],
        "ffn": config["intermediate_size"], "vocab": config["vocab_size"], "batch": run.batch, "seq": run.seq,
        "n_params": one.n_params, "status": _status(name, runs), "runs": len(steps),
        "step_forecast": one.step_seconds, "step_low": one.step_seconds_low, "step_high": one.step_seconds_high,
        "step_seconds": step, "step_error": step and one.step_seconds / step - 1,
        "device_forecast": one.device_seconds, "device_low": one.device_seconds_low,
        "device_high": one.device_seconds_high, "device_seconds": device,
        "device_error": device and one.device_seconds / device - 1,
        "device_spread": _pooled([m.device[name] for m in runs if name in m.device]),
    }  # fmt: skip


def _status(name: str, runs: Sequence[Measured]) -> str:
    """The first that is no success, else that; "forecast only" where nothing ran."""
    found = [run.status[name] for run in runs if name in run.status]
    return next((s for s in found if s != "ok"), "ok") if found else "forecast only"


def _shapes(profile: Profile, runs: Sequence[Measured]) -> list[Row]:
    ran = runs[0].shapes if runs else ()  # those chosen before, whatever the profile says now
    points = widths_shapes.survey(ran, SHAPES_RUN, profile) if ran else shapes(profile)
    rows = [_row(SHAPES, p, shape_plan(p.config).name, SHAPES_RUN, runs) for p in points]
    for rank, row in enumerate(rows):
        row["rank_forecast"] = rank + 1
    known = [row for row in rows if row["step_seconds"]]
    for rank, row in enumerate(sorted(known, key=_per_parameter)):
        row["rank_measured"] = rank + 1
        row["slower_than_best"] = _per_parameter(row) / min(map(_per_parameter, known)) - 1
    return rows


def _per_parameter(row: Row) -> float:
    return float(row["step_seconds"] / row["n_params"])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What the goals ask: penalties within 1.5 points, right signs, the recommended shape against the best. `kinds`:
    the same for multiples of 8 and more, of 2 and 4, and odd sizes, whose penalties are of other orders."""
    judged = [row for row in rows if row["penalty_error"] is not None]
    if not judged:
        return {"judged": 0}
    spreads = [row["penalty_spread"] for row in judged if row["penalty_spread"] is not None]
    kinds = {"8, 16, 32": (8, 16, 32), "2, 4": (2, 4), "odd": (1,)}
    stepped = [row for row in rows if row["step_penalty_error"] is not None]
    best = [row["slower_than_best"] for row in rows if row["rank_forecast"] == 1]
    return {
        **_judged(judged),
        "right_sign": mean(row["right_sign"] for row in judged),
        "within_interval": mean(row["within_interval"] for row in judged),
        "spread_points": median(spreads) if spreads else None,
        "device_error": median(abs(row["device_error"]) for row in rows if row["device_error"] is not None),
        "kinds": {
            kind: _judged(mine)
            for kind, multiples in kinds.items()
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
    errors = [abs(row["penalty_error"]) for row in rows]
    of_time = [abs((1 + row["penalty_forecast"]) / (1 + row["penalty_measured"]) - 1) for row in rows]
    return {
        "judged": len(rows),
        "within_goal": mean(error <= GOAL_POINTS for error in errors),
        "median_points": median(errors),
        "worst_points": max(errors),
        "median_of_time": median(of_time),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the table; prints the summary."""
    import argparse
    import json

    from flopcast.microbench import records
    from flopcast.roofline.lookup import find_profile

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--steps", type=Path, action="append", default=[], help="folder of a run; several")
    parser.add_argument("--out", type=Path, default=Path("reports/nvidia-h200/widths.csv"))
    given = parser.parse_args(arguments)
    rows = table(find_profile(given.gpu), [records.read(folder).rows for folder in given.steps])
    write_rows(given.out, COLUMNS, rows)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
