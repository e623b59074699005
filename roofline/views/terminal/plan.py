"""Prints the output of `flopcast plan`: days and dollars per GPU, or the largest model for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE, count, short_name, three_digits, utilisation
from flopcast.roofline.dollars.plan import DAY, cheapest
from flopcast.roofline.gpu.catalogue.prices import unranked
from flopcast.roofline.views.terminal.console import console, print_table
from flopcast.roofline.views.terminal.cost import ranged

if TYPE_CHECKING:
    from flopcast.roofline.dollars.plan import Largest, Plan
    from flopcast.roofline.dollars.points import CostCurve, Ranged
    from flopcast.roofline.stream.model.run import Run

PACE = "One GPU at the forecast's pace throughout: no evaluation, checkpoints, restarts or waiting for data"


def print_plans(found: Sequence[Plan], budget_usd: float | None = None, *, context: int | None = None) -> None:
    """Prints one row per GPU, and which is cheapest. `context`: that of the model, where the sequences follow it."""
    unit = found[0].unit
    many = found[0].run.layout.world
    columns = [
        "GPU",
        *(["layout"] if many > 1 else []),
        "batch x tokens" if unit == "tokens" else "batch",
        f"{unit}/s",
        "MFU",
        "days",
        "$",
    ]
    columns += [*([f"{unit} for ${budget_usd:,.10g}"] if budget_usd else []), f"$/M{unit[:-1]}", "bound by"]
    rows = []
    for plan in found:
        seconds, usd, point = plan.seconds, plan.usd, plan.point
        if point is None or seconds is None:
            rows.append([short_name(plan.gpu), *[NONE] * (len(columns) - 2), plan.reason or ""])
            continue
        bought = None if budget_usd is None else plan.tokens_for(budget_usd)
        rows.append(
            [short_name(plan.gpu), *([plan.run.parallel] if many > 1 else []), _batch_of(plan),
             three_digits(point.tokens_per_second.value), utilisation(plan.mfu),
             ranged(seconds, DAY), NONE if usd is None else ranged(usd),
             *([_counted(bought)] if budget_usd is not None else []),
             NONE if usd is None else three_digits(point.usd_per_million_tokens.value), point.step.bound]
        )  # fmt: skip
    first = next((plan.point.step for plan in found if plan.point is not None), None)
    depth = f"{first.depth} layers, " if first and first.depth else ""
    model = f"{count(first.n_params)} parameters, {depth}" if first else ""
    run = found[0].run
    micro = f"{run.accumulate} micro-batches per step, " if run.accumulate > 1 else ""
    how = f"{micro}{run.precision}, {run.optimizer}, {run.mode}"
    how += f", on {many} GPUs" if many > 1 else ""
    pace = PACE.replace("One GPU", f"{many} GPUs") if many > 1 else PACE
    title = f"Training {model}on {count(found[0].tokens)} {unit}; {how} (90% intervals)"
    print_table(title, columns, rows, f"{_batch_words(found[0], context)}\n{pace}", ruled=False)
    _print_prices(found)
    best = cheapest(found)
    if best is not None:
        plan, rivals = best
        others = f"; by the intervals {', '.join(map(short_name, rivals))} may be cheaper" if rivals else ""
        console().print(f"- least dollars: {short_name(plan.gpu)}{others}")
    for plan in found:
        if plan.point is None:
            batch = max(plan.run.batch, 1)
            even = "not even " if plan.is_largest else ""
            shorter = "a shorter --seq or " if unit == "tokens" else ""
            words = f"{even}{_batch_of(plan, batch)} {unit} fit; {shorter}--checkpoint full may"
            console().print(f"- {short_name(plan.gpu)}: {words if even else words.replace(' fit;', ' do not fit;')}")
        if (why := unranked(plan.price)) is not None:
            console().print(f"- not ranked: {short_name(plan.gpu)}, {why}")


def _batch_of(plan: Plan, batch: int | None = None) -> str:
    batch = plan.run.batch if batch is None else batch
    return f"{batch:,} x {plan.run.seq:,}" if plan.unit == "tokens" else f"{batch:,}"


def _batch_words(plan: Plan, context: int | None) -> str:
    """Says how large the batches are and why."""
    if plan.unit != "tokens":
        largest = "the largest that fits on each GPU" if plan.is_largest else f"{plan.run.batch:,} {plan.unit}"
        return f"batch: {largest}"
    seq = f"{plan.run.seq:,} tokens"
    batch = "the largest batch that fits on each GPU" if plan.is_largest else f"{plan.run.batch:,} sequences"
    if context is None:
        return f"batch: {batch}, sequences of {seq}"
    own = "the model's own context" if context == plan.run.seq else f"of the model's context of {context:,}"
    return f"batch: {batch}, sequences of {seq}, {own} (others: --batch, --seq)"


def _counted(found: Ranged | None) -> str:
    return NONE if found is None else f"{count(found.value)} ({count(found.low)}-{count(found.high)})"


def print_largest(found: Sequence[Largest], curves: Sequence[CostCurve], tokens_per_parameter: float, run: Run) -> None:
    """Prints the largest model for a budget, one row per GPU."""
    rows = []
    for row, curve in zip(found, curves, strict=True):
        smallest = count(curve.fitting[0].step.n_params) if curve.fitting else None
        if row.n_params is None or row.cost_usd is None or row.days is None:
            why = f"{row.limited_by}: the smallest has {smallest}" if smallest else row.limited_by
            rows.append([short_name(row.gpu), NONE, NONE, NONE, NONE, why])
            continue
        low = count(row.low) if row.low else f"below {smallest}"
        rows.append(
            [short_name(row.gpu), f"{count(row.n_params)} ({low}-{count(row.high or row.n_params)})",
             count(row.n_params * tokens_per_parameter), three_digits(row.cost_usd), three_digits(row.days),
             row.limited_by]
        )  # fmt: skip
    title = (
        f"Largest model of the ladder for ${found[0].usd:,.10g} at {tokens_per_parameter:g} tokens per parameter, "
        f"{run.batch} x {run.seq} tokens per step (larger batches cost less per token: --batch, --seq)"
    )
    print_table(title, ("GPU", "parameters", "tokens", "$", "days", "limited by"), rows, PACE, ruled=False)
    _print_prices(curves)


def _print_prices(found: Sequence[Plan] | Sequence[CostCurve]) -> None:
    for each in found:
        words = "no price" if each.price is None else each.price.label
        console().print(f"{short_name(each.gpu)} ({each.basis}): {words}")
