"""Turns the results of `crossovers` and `points` into rows for `flopcast cost`: CSV columns and JSON fields."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from flopcast.roofline.dollars.crossovers import Best, Scenario, best_gpu, break_even_price_ratio, crossovers, sentence
from flopcast.roofline.dollars.points import CostCurve, CostPoint, Ranged, ladder_sizes
from flopcast.roofline.gpu.catalogue.prices import Price

Row = dict[str, Any]


def cost_tables(curves: Sequence[CostCurve]) -> dict[str, list[Row]]:
    """Returns by name the tables of the curves' points, crossovers, break-even prices, the best GPU at each size, and
    the sizes at which each GPU runs out of memory."""
    sizes = ladder_sizes(curves)
    pairs = [(a, b, size) for size in sizes for a, b in combinations(curves, 2)]
    break_even = [row for a, b, size in pairs if (row := break_even_price_ratio(a, b, size)) is not None]
    return {
        "points": cost_rows(curves),
        "crossovers": [{**vars(row), "sentence": sentence(row)} for row in crossovers(curves)],
        "break_even": [{**vars(row), "better": row.better} for row in break_even],
        "best": [_best_row(best) for size in sizes if (best := best_gpu(curves, size)) is not None],
        "memory": [_memory_row(curve) for curve in curves],
    }


def scenario_rows(found: Sequence[Scenario]) -> list[Row]:
    return [{"host_factor": row.host_factor, "batch": row.batch, **_best_row(row.best)} for row in found]


def cost_rows(curves: Sequence[CostCurve]) -> list[Row]:
    """Returns one row per point; for points that do not fit, the figures are empty and `reason` says why."""
    return [_cost_row(curve, point) for curve in curves for point in curve.points]


def _cost_row(curve: CostCurve, point: CostPoint) -> Row:
    step, price = point.step, point.price
    is_priced = price is not None
    figures = _ends("step_seconds", step.seconds)
    figures |= _ends("flops_per_second", point.flops_per_second)
    figures |= _ends("flops_per_usd", point.flops_per_usd if is_priced else None)
    figures |= _ends("usd_per_million_tokens", point.usd_per_million_tokens if is_priced else None)
    figures |= _ends("tokens_per_second", point.tokens_per_second)
    figures |= {
        "usd_per_step": point.usd_per_step if is_priced else None,
        "device_seconds": step.device_seconds, "host_seconds": step.host_seconds,
    }  # fmt: skip
    return {
        "gpu": curve.gpu,
        "profile_basis": curve.basis,
        "n_params": step.n_params,
        "width": step.width,
        "depth": step.depth,
        "tokens": step.tokens,
        "flops_counted": step.flops_counted,
        "fits": step.fits,
        **(figures if step.fits else dict.fromkeys(figures)),
        "bound": (step.bound or None) if step.fits else None,
        "needed_bytes": step.needed_bytes,
        **price_cells(price),
        "price_date_inferred": price and price.date_inferred,
        "unranked": curve.unranked,
        "reason": None if step.fits else "out of memory",
    }


def price_cells(price: Price | None) -> Row:
    """The columns of a price in a row of something else, empty without a price."""
    if price is None:
        return dict.fromkeys(("price_usd_per_hour", "price_provider", "price_kind", "price_date", "price_age_days"))
    return {
        "price_usd_per_hour": price.usd_per_hour, "price_provider": price.provider, "price_kind": price.kind,
        "price_date": price.date.isoformat(), "price_age_days": price.age_days,
    }  # fmt: skip


def _best_row(best: Best) -> Row:
    return {
        "n_params": best.n_params,
        "gpu": best.gpu,
        **_ends("flops_per_usd", best.flops_per_usd),
        "separable": best.separable,
        "contenders": " ".join(best.contenders),
    }


def _memory_row(curve: CostCurve) -> Row:
    """Returns where a GPU runs out of memory, in parameters; `memory_limit` lies between the other two figures."""
    return {
        "gpu": curve.gpu,
        "largest_that_fits": curve.largest_fitting,
        "first_that_does_not": curve.smallest_failing,
        "memory_limit": curve.memory_limit,
    }


def _ends(name: str, found: Ranged | None) -> dict[str, float | None]:
    if found is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
