"""Makes the report page's tables on cost: prices, cost by model size, leaders, crossovers, break-even ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from operator import attrgetter, itemgetter

from flopcast.roofline.base.units import count, ms_in_column, short_name, three_in_column, yes_no
from flopcast.roofline.dollars.crossovers import Best, best_gpu, break_even_price_ratio, crossovers, sentence
from flopcast.roofline.dollars.modes import ByMode, leaders
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.dollars.tables import cost_rows
from flopcast.roofline.views.page.table import Column, Table, prose, text


def _peta(value: float) -> str:
    return three_in_column(value / 1e15)


def price_table(curves: Sequence[CostCurve]) -> Table | None:
    if not curves:
        return None
    columns = [
        text("gpu", "GPU"), Column("usd_per_hour", "$/hour", "{:.2f}".format, attrgetter("price.usd_per_hour")),
        text("provider", "provider", attrgetter("price.provider")), text("kind", "kind", attrgetter("price.kind")),
        text("date", "date", attrgetter("price.date")),
        Column("age_days", "days old", of=attrgetter("price.age_days")),
        Column("date_inferred", "date inferred", yes_no, attrgetter("price.date_inferred"), is_number=False),
        text("basis", "profile"), prose("source", "source", attrgetter("price.source")),
    ]  # fmt: skip
    return Table("prices", "Prices used", "Per GPU and hour, as the provider listed it on that day.", columns, curves)


def cost_table(curves: Sequence[CostCurve]) -> Table | None:
    rows = cost_rows(curves)
    if not rows:
        return None
    columns = [
        text("gpu", "GPU"), text("profile_basis", "profile"), Column("width", "width"), Column("depth", "layers"),
        Column("n_params", "parameters", count), *_ranged("step_seconds", "step, ms", ms_in_column),
        *_ranged("usd_per_million_tokens", "$/Mtoken", three_in_column), *_ranged("flops_per_usd", "PFLOP/$", _peta),
        text("reason", "reason"),
    ]  # fmt: skip
    note = f"Counted FLOPs, {rows[0]['tokens']:,} tokens per step; low and high: 90% intervals."
    return Table("costs", "Cost by GPU and model size", note, columns, rows)


def _ranged(key: str, label: str, show: Callable[[float], str]) -> list[Column]:
    """Columns for a value and the ends of its interval."""
    return [Column(key, label, show), Column(f"{key}_low", "low", show), Column(f"{key}_high", "high", show)]


def leader_table(curves: Sequence[CostCurve]) -> Table | None:
    found = [best for size in _sizes(curves) if (best := best_gpu(curves, size)) is not None]
    if len(curves) < 2 or not found:
        return None
    columns = [
        Column("n_params", "parameters", count), text("gpu", "most FLOPs per dollar"),
        Column("flops_per_usd", "PFLOP/$", _peta, attrgetter("flops_per_usd.value")),
        Column("flops_per_usd_low", "low", _peta, attrgetter("flops_per_usd.low")),
        Column("flops_per_usd_high", "high", _peta, attrgetter("flops_per_usd.high")),
        prose("contenders", "not separable from it", lambda b: ", ".join(b.contenders) or "none"),
    ]  # fmt: skip
    note = "At the prices above. A GPU whose interval reaches the leader's is named beside it."
    return Table("leaders", "Which GPU leads", note, columns, found)


def mode_table(by_mode: ByMode) -> Table | None:
    """Who leads at each size, a column a mode."""
    if len(by_mode) < 2 or any(len(curves) < 2 for curves in by_mode.values()):
        return None
    rows: dict[float, dict[str, Best]] = {}
    for one in leaders(by_mode):
        rows.setdefault(one.best.n_params, {})[one.mode] = one.best
    columns = [Column("n_params", "parameters", count, itemgetter(0))]
    for mode in by_mode:
        columns += [
            text(mode, mode, partial(_leader_in, mode)),
            Column(f"{mode}_flops_per_usd", "PFLOP/$", _peta, partial(_value_in, mode, "value")),
            Column(f"{mode}_low", "low", _peta, partial(_value_in, mode, "low")),
            Column(f"{mode}_high", "high", _peta, partial(_value_in, mode, "high")),
        ]  # fmt: skip
    note = "Most FLOPs per dollar where steps run in a mode; * not separable from another GPU at 90%."
    return Table("modes", "Which GPU leads, by mode", note, columns, sorted(rows.items()))


def _leader_in(mode: str, row: tuple[float, Mapping[str, Best]]) -> str | None:
    best = row[1].get(mode)
    return None if best is None else short_name(best.gpu) + ("" if best.separable else " *")


def _value_in(mode: str, end: str, row: tuple[float, Mapping[str, Best]]) -> float | None:
    best = row[1].get(mode)
    return None if best is None else float(getattr(best.flops_per_usd, end))


def _sizes(curves: Sequence[CostCurve]) -> list[float]:
    return sorted({float(p.step.n_params) for c in curves for p in c.fitting})


def crossover_table(curves: Sequence[CostCurve]) -> Table | None:
    if len(curves) < 2:
        return None
    columns = [
        text("gpu_a", "GPU"), text("gpu_b", "against"), text("status", "outcome"),
        Column("n_params", "at parameters", count), Column("low", "low", count), Column("high", "high", count),
        prose("sentence", "in words", sentence),
    ]  # fmt: skip
    note = "Two GPUs' errors are taken as independent; 90% intervals."
    return Table("crossovers", "Crossovers", note, columns, crossovers(curves))


def break_even_table(curves: Sequence[CostCurve], gpu: str) -> Table | None:
    """The price ratios at which two GPUs are equal, for the pairs of `gpu` (of all, if it has no curve)."""
    sizes = _sizes(curves)
    if len(curves) < 2 or not sizes:
        return None
    few = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    pairs = [(size, a, b) for size in few for a, b in combinations(curves, 2)]
    found = [row for size, a, b in pairs if (row := break_even_price_ratio(a, b, size)) is not None]
    columns = [
        text("gpu_a", "GPU a"), text("gpu_b", "GPU b"), Column("n_params", "parameters", count),
        Column("ratio", "equal at price a / b", three_in_column), Column("low", "low", three_in_column),
        Column("high", "high", three_in_column), Column("price_ratio", "today's price a / b", three_in_column),
        text("better", "better buy today", lambda row: row.better or "not separable"),
    ]  # fmt: skip
    note = "Depends on speed alone, so it outlives any price list: below this ratio of prices a is the better buy."
    own = [row for row in found if gpu in (row.gpu_a, row.gpu_b)]
    return Table("break-even", "Break-even prices", note, columns, own or found)
