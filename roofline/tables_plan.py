"""What the terminal shows of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flopcast.roofline.canvas import count
from flopcast.roofline.plan import DAY, cheapest
from flopcast.roofline.tables import NONE, console, short
from flopcast.roofline.tables_cost import lean, ranged, three

if TYPE_CHECKING:
    from flopcast.roofline.cost import CostCurve
    from flopcast.roofline.forecast import Run
    from flopcast.roofline.plan import Largest, Plan

PACE = "One GPU at the forecast's pace throughout: no evaluation, checkpoints, restarts or waiting for data"


def plan_document(found: Sequence[Plan], budget_usd: float | None = None) -> dict[str, Any]:
    """What `plan --json` prints for a model."""
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


def print_plans(found: Sequence[Plan], budget_usd: float | None = None) -> None:
    """A row a GPU, and which is cheapest."""
    rows = []
    for plan in found:
        seconds, usd, point = plan.seconds, plan.usd, plan.point
        if point is None or seconds is None or usd is None:
            rows.append([short(plan.gpu), *[NONE] * (7 if budget_usd else 6), plan.reason or ""])
            continue
        bought = None if budget_usd is None else plan.tokens_for(budget_usd)
        rows.append(
            [
                short(plan.gpu), str(plan.run.batch), f"{point.tokens_per_second.value:,.0f}",
                f"{plan.mfu or 0.0:.1%}", ranged(seconds, DAY), ranged(usd),
                *([f"{count(bought.value)} ({count(bought.low)}-{count(bought.high)})"] if bought else []),
                three(point.usd_per_million_tokens.value), point.step.bound,
            ]
        )  # fmt: skip
    first = next((plan.point.step for plan in found if plan.point is not None), None)
    model = f"{count(first.n_params)} parameters, {first.depth} layers, " if first else ""
    columns = ["GPU", "batch", "tokens/s", "MFU", "days", "$"]
    columns += [*([f"tokens for ${budget_usd:,.10g}"] if budget_usd else []), "$/Mtoken", "bound by"]
    run = found[0].run
    how = f"sequences of {run.seq}, {run.optimizer}" + (
        f", {run.accumulate} a step" if run.accumulate > 1 else ""
    )
    out = console()
    title = f"Training {model}on {count(found[0].tokens)} tokens; {how} (90% intervals)"
    out.print(lean(title, columns, rows, PACE))
    for plan in found:
        out.print(f"{short(plan.gpu)} ({plan.basis}): {plan.price.label}")
    best = cheapest(found)
    if best is not None:
        plan, rivals = best
        others = f"; by the intervals {', '.join(map(short, rivals))} may be cheaper" if rivals else ""
        out.print(f"- least dollars: {short(plan.gpu)}{others}")


def largest_document(
    found: Sequence[Largest], curves: Sequence[CostCurve], tokens_per_parameter: float
) -> dict[str, Any]:
    """What `plan --budget-usd X --json` prints without a model."""
    ladder = [{"width": p.step.width, "depth": p.step.depth} for p in curves[0].points] if curves else []
    prices = {c.gpu: {"usd_per_hour": c.price.usd_per_hour, "provider": c.price.provider,
                      "date": c.price.date.isoformat()} for c in curves}  # fmt: skip
    return {
        "tokens_per_parameter": tokens_per_parameter,
        "ladder": ladder,
        "largest": [asdict(row) for row in found],
        "prices": prices,
    }


def print_largest(
    found: Sequence[Largest], curves: Sequence[CostCurve], tokens_per_parameter: float, run: Run
) -> None:
    """A row a GPU."""
    rows = []
    for row, curve in zip(found, curves, strict=True):
        if row.n_params is None or row.cost_usd is None or row.days is None:
            small = curve.fitting[0].step.n_params if curve.fitting else None
            why = f"{row.limited_by}: the smallest has {count(small)}" if small else row.limited_by
            rows.append([short(row.gpu), NONE, NONE, NONE, NONE, why])
            continue
        low = count(row.low) if row.low else f"below {count(curve.fitting[0].step.n_params)}"
        rows.append(
            [
                short(row.gpu), f"{count(row.n_params)} ({low}-{count(row.high or row.n_params)})",
                count(row.n_params * tokens_per_parameter), three(row.cost_usd), three(row.days), row.limited_by,
            ]
        )  # fmt: skip
    out = console()
    title = (
        f"Largest model of the ladder for ${found[0].usd:,.10g} at {tokens_per_parameter:g} tokens a parameter, "
        f"{run.batch} x {run.seq} tokens a step"
    )
    columns = ("GPU", "parameters", "tokens", "$", "days", "limited by")
    out.print(lean(title, columns, rows, PACE))
    for curve in curves:
        out.print(f"{short(curve.gpu)} ({curve.basis}): {curve.price.label}")
