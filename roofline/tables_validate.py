"""What `validate` prints: every step, the errors by component and by kind of step, and what others would have said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flopcast.roofline import baselines
from flopcast.roofline.tables import NONE, console, ms, percent, say, share, table
from flopcast.roofline.tables_cost import lean

Row = Mapping[str, Any]


def print_validation(rows: Sequence[Row], summary: Sequence[Row]) -> None:
    """The tables of `validate`, for rows of `validate.compare` and of `validate.summary`."""
    out = console()
    shown = [
        [row_label(r), ms(r["step_seconds"]), ms(r["step_forecast"]), percent(r["step_error"]),
         ms(r["device_seconds"]), percent(r["device_error"]), ms(r["host_seconds"]), percent(r["host_error"]),
         percent(r["peak_error"]), share(r["measured_share"]), r["bound"] or NONE, r["status"]]
        for r in rows
    ]  # fmt: skip
    columns = ("step", "ms", "forecast", "error", "device ms", "error", "host ms", "error", "memory", "measured",
               "bound", "status")  # fmt: skip
    title = "Forecast against real steps (none used in fitting)"
    out.print(lean(title, columns, shown, "measured: share of the kernel time in shapes that were"))
    for row in rows:
        if row["reason"]:
            say(f"{row_label(row)}: {row['reason']}")
    parts = ("step", "device", "host", "peak")
    totals = [
        [s["rows"], str(s["n"]), *(_pair(s, p) for p in parts),
         share(s["coverage"]), share(s["interval_width"])]
        for s in summary
    ]  # fmt: skip
    out.print(table("|error|, median / worst", ("rows", "n", *parts, "in 90% interval", "its width"), totals))
    methods = baselines.compare_methods(rows)
    if len(methods) > 1:
        sets = ("all", "device-bound", "host-bound")
        lines = [[m["label"], *(_pair(m, name) for name in sets)] for m in methods]
        title = f"|error| of the step, median / worst, on the same {methods[0]['n']} steps"
        out.print(table(title, ("forecast by", *sets), lines))


def _pair(found: Row, name: str) -> str:
    """median / worst"""
    median, worst = found[f"{name}_median"], found[f"{name}_worst"]
    return NONE if median is None else f"{share(median)} / {share(worst)}"


def row_label(row: Row) -> str:
    """w1024-d5 4x256 fused triton: the step in a line."""
    usual = {"optimizer": "adamw", "matmul": "torch", "attention": "sdpa", "precision": "autocast-bf16",
             "checkpoint": "none", "accumulate": 1, "fused": "none"}  # fmt: skip
    said = {name: row[name] for name, value in usual.items() if row.get(name) not in (None, value)}
    if "optimizer" in said:
        said["optimizer"] = str(said["optimizer"]).removeprefix("adamw-")
    if "accumulate" in said:
        said["accumulate"] = f"accumulate {said['accumulate']}"
    if "checkpoint" in said:
        said["checkpoint"] = "checkpoint"
    if "fused" in said:
        said["fused"] = f"fused {said['fused']}"
    size = f"{row['batch']}" if row["module"] else f"{row['batch']}x{row['seq']}"
    return " ".join([row["name"], size, *dict.fromkeys(map(str, said.values()))])
