"""Prints the output of `flopcast sweep` without a file: a row per step and GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flopcast.roofline.base.units import NONE, gigabytes, ms, short_name, three_digits, yes_no
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.terminal.console import print_table, warn

INPUTS = ("name", "config", "width", "depth", *Run().to_json())


def print_sweep(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows of `step.sweep.sweep` on stdout, with what differs between them, and warnings on stderr."""
    varied = [name for name in INPUTS if len({row.get(name) for row in rows}) > 1]
    unit = next((row["unit"] for row in rows if row.get("unit")), "tokens")
    columns = ["GPU", *varied, "step, ms", "90% interval", "memory", "fits", f"{unit}/s", f"$/M {unit}", "bound by"]
    shown = []
    for row in rows:
        start = [short_name(row["gpu"]), *(str(NONE if row.get(name) is None else row[name]) for name in varied)]
        if row.get("step_seconds") is None:
            shown.append([*start, *[NONE] * 6, str(row.get("reason") or NONE)])
            continue
        usd = row["usd_per_step"] if row["fits"] else None
        per_second = row["tokens_per_second"]
        interval = f"{ms(row['step_seconds_low'])} to {ms(row['step_seconds_high'])}"
        cost = NONE if usd is None else three_digits(usd / (per_second * row["step_seconds"]) * 1e6)
        shown.append(
            [*start, ms(row["step_seconds"]), interval, gigabytes(row["peak_bytes"]), yes_no(row["fits"]),
             three_digits(per_second) if row["fits"] else NONE, cost, row["bound"]]
        )  # fmt: skip
    print_table("Steps (90% intervals; memory: peak, allocated)", columns, shown, ruled=False)
    warn(dict.fromkeys(f"{short_name(row['gpu'])}: {row['warnings']}" for row in rows if row.get("warnings")))
