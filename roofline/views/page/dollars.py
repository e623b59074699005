"""The tables of the report page on money: prices, cost by model size, who leads, crossovers, break-even ratios."""

from __future__ import annotations

from collections.abc import Sequence

from flopcast.roofline.base.units import count, ms_in_column, three_in_column, yes_no
from flopcast.roofline.dollars.crossovers import best_rows, break_even_rows, cost_rows, crossover_rows
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.views.page.table import Column, Table, prose, text


def price_table(curves: Sequence[CostCurve]) -> Table | None:
    if not curves:
        return None
    rows = [
        {"gpu": c.gpu, "basis": c.basis, "usd_per_hour": c.price.usd_per_hour, "provider": c.price.provider,
         "kind": c.price.kind, "date": f"{c.price.date}", "date_inferred": c.price.date_inferred,
         "source": c.price.source}
        for c in curves
    ]  # fmt: skip
    columns = [
        text("gpu", "GPU"), Column("usd_per_hour", "$/hour", lambda usd: f"{usd:.2f}"), text("provider", "provider"),
        text("kind", "kind"), text("date", "date"), Column("date_inferred", "date inferred", yes_no, is_number=False),
        text("basis", "profile"), prose("source", "source"),
    ]  # fmt: skip
    return Table("prices", "Prices used", "Per GPU and hour, as the provider listed it on that day.", columns, rows)


def cost_table(curves: Sequence[CostCurve]) -> Table | None:
    rows = cost_rows(curves)
    if not rows:
        return None
    columns = [
        text("gpu", "GPU"), text("profile_basis", "profile"), Column("width", "width"), Column("depth", "layers"),
        Column("n_params", "parameters", count), Column("step_seconds", "step, ms", ms_in_column),
        Column("step_seconds_low", "low", ms_in_column),
        Column("step_seconds_high", "high", ms_in_column),
        Column("usd_per_million_tokens", "$/Mtoken", three_in_column),
        Column("usd_per_million_tokens_low", "low", three_in_column),
        Column("usd_per_million_tokens_high", "high", three_in_column),
        Column("flops_per_usd", "PFLOP/$", lambda v: three_in_column(v / 1e15)),
        Column("flops_per_usd_low", "low", lambda v: three_in_column(v / 1e15)),
        Column("flops_per_usd_high", "high", lambda v: three_in_column(v / 1e15)), text("reason", "reason"),
    ]  # fmt: skip
    note = f"Counted FLOPs, {rows[0]['tokens']:,} tokens a step; low and high: 90% intervals."
    return Table("costs", "Cost by GPU and model size", note, columns, rows)


def leader_table(curves: Sequence[CostCurve]) -> Table | None:
    sizes = sorted({float(p.step.n_params) for c in curves for p in c.fitting})
    rows = best_rows(curves, sizes)
    if len(curves) < 2 or not rows:
        return None
    columns = [
        Column("n_params", "parameters", count),
        text("gpu", "most FLOPs per dollar"),
        Column("flops_per_usd", "PFLOP/$", lambda v: three_in_column(v / 1e15)),
        Column("flops_per_usd_low", "low", lambda v: three_in_column(v / 1e15)),
        Column("flops_per_usd_high", "high", lambda v: three_in_column(v / 1e15)),
        prose("contenders", "not separable from it"),
    ]
    for row in rows:
        row["contenders"] = row["contenders"].replace(" ", ", ") or "none"
    note = "At the prices above. A GPU whose interval reaches the leader's is named beside it."
    return Table("leaders", "Which GPU leads", note, columns, rows)


def crossover_table(curves: Sequence[CostCurve]) -> Table | None:
    if len(curves) < 2:
        return None
    columns = [
        text("gpu_a", "GPU"), text("gpu_b", "against"), text("status", "outcome"),
        Column("n_params", "at parameters", count),
        Column("low", "low", count), Column("high", "high", count), prose("sentence", "in words"),
    ]  # fmt: skip
    note = "Two GPUs' errors are taken as independent; 90% intervals."
    return Table("crossovers", "Crossovers", note, columns, crossover_rows(curves))


def break_even_table(curves: Sequence[CostCurve], gpu: str) -> Table | None:
    """The price ratios at which two GPUs are equal, for the pairs of `gpu` (of all, if it has no curve)."""
    sizes = sorted({float(p.step.n_params) for c in curves for p in c.fitting})
    if len(curves) < 2 or not sizes:
        return None
    few = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    rows = break_even_rows(curves, few)
    rows = [row for row in rows if gpu in (row["gpu_a"], row["gpu_b"])] or rows
    for row in rows:
        row["better"] = row["better"] or "not separable"
    columns = [
        text("gpu_a", "GPU a"), text("gpu_b", "GPU b"), Column("n_params", "parameters", count),
        Column("ratio", "equal at price a / b", three_in_column), Column("low", "low", three_in_column),
        Column("high", "high", three_in_column),
        Column("price_ratio", "today's price a / b", three_in_column), text("better", "better buy today"),
    ]  # fmt: skip
    note = "Depends on speed alone, so it outlives any price list: below this ratio of prices a is the better buy."
    return Table("break-even", "Break-even prices", note, columns, rows)
