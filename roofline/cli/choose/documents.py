"""Builds the JSON documents of `cost` and `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flopcast.roofline.dollars.crossovers import Scenario
from flopcast.roofline.dollars.modes import ByMode, leader_rows
from flopcast.roofline.dollars.plan import Largest, Plan, cheapest
from flopcast.roofline.dollars.tables import cost_tables, scenario_rows

if TYPE_CHECKING:
    from flopcast.roofline.dollars.points import CostCurve
    from flopcast.roofline.stream.model.run import Run


def cost_document(
    curves: Sequence[CostCurve],
    run: Run,
    *,
    hosts: str,
    host: str | None,
    scenarios: Sequence[Scenario],
    by_mode: ByMode,
) -> dict[str, Any]:
    """Builds the document that `cost --json` prints."""
    return {
        "ladder": [{"width": point.step.width, "depth": point.step.depth} for point in curves[0].points],
        "run": {"batch": run.batch, "seq": run.seq, "optimizer": run.optimizer, "mode": run.mode},
        "hosts": hosts if host is None else "same",
        "host": host,
        **cost_tables(curves),
        "what_if": scenario_rows(scenarios),
        **({"modes": leader_rows(by_mode)} if by_mode else {}),
    }


def plan_document(found: Sequence[Plan], budget_usd: float | None = None) -> dict[str, Any]:
    """Builds the document that `plan --json` prints for a model."""
    best = cheapest(found)
    rows = []
    for plan in found:
        bought = None if budget_usd is None else plan.tokens_for(budget_usd)
        more = {} if budget_usd is None else {
            "tokens_for_budget": None if bought is None else bought.value,
            "tokens_for_budget_low": None if bought is None else bought.low,
            "tokens_for_budget_high": None if bought is None else bought.high,
        }  # fmt: skip
        rows.append({**plan.to_json(), **more})
    first = next((plan.point.step for plan in found if plan.point is not None), None)
    return {
        "n_params": None if first is None else first.n_params,
        "depth": None if first is None else first.depth,
        "tokens": found[0].tokens if found else None,
        "budget_usd": budget_usd,
        "plans": rows,
        "cheapest": None if best is None else {"gpu": best[0].gpu, "contenders": list(best[1])},
    }


def largest_document(
    found: Sequence[Largest], curves: Sequence[CostCurve], tokens_per_parameter: float
) -> dict[str, Any]:
    """Builds the document that `plan --budget-usd X --json` prints without a model."""
    ladder = [{"width": p.step.width, "depth": p.step.depth} for p in curves[0].points] if curves else []
    prices = {c.gpu: c.price and c.price.to_json() for c in curves}
    return {
        "tokens_per_parameter": tokens_per_parameter,
        "ladder": ladder,
        "largest": [asdict(row) for row in found],
        "prices": prices,
    }
