"""What the terminal shows of dollars: FLOPs per dollar, break-even prices, what would change, the price book, plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import log
from typing import TYPE_CHECKING, Any

from flopcast.roofline.base.units import NONE, count, parameters, short_name, three_digits
from flopcast.roofline.views.terminal.console import console, table

if TYPE_CHECKING:
    from rich.table import Table

    from flopcast.roofline.dollars.points import CostCurve, Ranged
    from flopcast.roofline.gpu.catalogue.prices import Price
    from flopcast.roofline.stream.model.models import Config
    from flopcast.roofline.stream.model.run import Run


from dataclasses import asdict
from typing import TYPE_CHECKING

from flopcast.roofline.dollars.plan import DAY, cheapest

if TYPE_CHECKING:
    from flopcast.roofline.dollars.plan import Largest, Plan
    from flopcast.roofline.dollars.points import CostCurve
    from flopcast.roofline.stream.model.run import Run


PETA, TERA = 1e15, 1e12
SHOWN_SIZES = 4  # columns of sizes that fit beside each other


def document(
    curves: Sequence[CostCurve],
    models: Sequence[Config],
    run: Run,
    *,
    hosts: str,
    host: str | None,
    scenarios: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What `cost --json` prints."""
    from flopcast.roofline.dollars.crossovers import best_rows, break_even_rows, cost_rows, crossover_rows, memory_rows

    sizes = sorted({float(point.step.n_params) for curve in curves for point in curve.points})
    return {
        "ladder": [{"width": m["hidden_size"], "depth": m["num_hidden_layers"]} for m in models],
        "run": {"batch": run.batch, "seq": run.seq, "optimizer": run.optimizer, "mode": run.mode},
        "hosts": hosts if host is None else "same",
        "host": host,
        "points": cost_rows(curves),
        "crossovers": crossover_rows(curves),
        "break_even": break_even_rows(curves, sizes),
        "best": best_rows(curves, sizes),
        "memory": memory_rows(curves),
        "what_if": list(scenarios),
    }


def spread_sizes(curves: Sequence[CostCurve], most: int = SHOWN_SIZES) -> list[float]:
    """Parameters of at most so many models, evenly apart in logarithms, the smallest and the largest among them."""
    sizes = sorted({float(point.step.n_params) for curve in curves for point in curve.points})
    if len(sizes) <= most:
        return sizes
    low, step = log(sizes[0]), log(sizes[-1] / sizes[0]) / (most - 1)
    wanted = (low + step * i for i in range(most))
    return sorted({min(sizes, key=lambda size: abs(log(size) - at)) for at in wanted})


def two(value: float) -> str:
    """Two digits, for the ends of intervals: 0.031, 7, 110."""
    return f"{float(f'{value:.2g}'):,.10g}"


def span(value: float, low: float, high: float) -> str:
    """83.2 (56-120)"""
    return f"{three_digits(value)} ({two(low)}-{two(high)})"


def ranged(found: Ranged, unit: float = 1.0) -> str:
    """83.2 (56-120)"""
    return span(found.value / unit, found.low / unit, found.high / unit)


def lean(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """`tables.table` without rules between columns: seven columns of intervals fit into a terminal."""
    from rich.box import SIMPLE_HEAD

    made = table(title, columns, rows, caption)
    made.box, made.padding, made.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
    for column, cells in zip(made.columns, zip(*rows, strict=True), strict=False):
        # narrow terminals break cells at blanks, never inside a number: cut short, (41-84) would read (41-8
        column.min_width = max(len(word) for cell in (column.header, *cells) for word in str(cell).split() or [""])
    return made


def print_cost(
    curves: Sequence[CostCurve], run: Run, scenarios: Sequence[Mapping[str, Any]], *, one_host: bool = False
) -> None:
    """The curves, three sizes in full, break-even prices, what would change, and each pair in a sentence."""
    from flopcast.roofline.dollars.crossovers import crossovers, sentence

    out = console()
    out.print(_curve_table(curves, run, one_host))
    out.print(_gpu_table(curves))
    out.print(_size_table(curves))
    if len(curves) > 1:
        out.print(_break_even_table(curves))
        out.print(_what_if_table(curves, scenarios))
    for row in crossovers(curves):
        out.print(f"- {sentence(row)}")


def _curve_table(curves: Sequence[CostCurve], run: Run, one_host: bool) -> Table:
    from flopcast.roofline.dollars.crossovers import best_gpu

    rows = []
    for points in zip(*(curve.points for curve in curves), strict=True):
        step = points[0].step
        cells = [ranged(p.flops_per_usd, PETA) if p.step.fits else "no memory" for p in points]
        best = best_gpu(curves, float(step.n_params))
        leader = NONE if best is None else short_name(best.gpu) + ("" if best.separable else " *")
        rows.append([f"{step.width} x {step.depth}", parameters(step.n_params), *cells, leader])
    how = f"{run.batch} x {run.seq} tokens, {run.optimizer}, {run.mode}"
    title = f"PFLOP per dollar (90% interval), counted FLOPs; {how}"
    columns = ("width x depth", "parameters", *(short_name(c.gpu) for c in curves), "best")
    fed = "one host feeds all of them" if one_host else "each stands in a host of its own (--hosts)"
    return lean(title, columns, rows, f"* not separable from the next one at these prices and intervals; {fed}")


def _gpu_table(curves: Sequence[CostCurve]) -> Table:
    rows = [
        [c.gpu, c.basis or NONE, c.price.label, f"{count(c.memory_limit)} parameters" if c.memory_limit else
         (NONE if c.fitting else "fits none of these")]
        for c in curves
    ]  # fmt: skip
    return lean("Prices and memory", ("GPU", "profile", "price", "runs out of memory at"), rows)


def _size_table(curves: Sequence[CostCurve]) -> Table:
    rows = []
    for size in spread_sizes(curves, 3):
        for curve in curves:
            found = next((p for p in curve.points if p.step.n_params == size and p.step.fits), None)
            if found is None:
                continue
            s = found.step
            rows.append(
                [
                    count(size), short_name(curve.gpu), span(s.step_seconds * 1e3, s.low * 1e3, s.high * 1e3),
                    s.bound or NONE, ranged(found.flops_per_second, TERA), ranged(found.flops_per_usd, PETA),
                    ranged(found.usd_per_million_tokens),
                ]
            )  # fmt: skip
    columns = ("parameters", "GPU", "step, ms", "bound by", "TFLOP/s", "PFLOP/$", "$/Mtoken")
    return lean("Steps in full (all in cost.csv, --out)", columns, rows)


def _break_even_table(curves: Sequence[CostCurve]) -> Table:
    from flopcast.roofline.dollars.crossovers import break_even_price_ratio

    sizes = spread_sizes(curves)
    rows = []
    for a, b in combinations(curves, 2):
        cells = []
        for size in sizes:
            found = break_even_price_ratio(a, b, size)
            if found is None:
                cells.append(NONE)
                continue
            mark = {a.gpu: " a", b.gpu: " b"}.get(found.better or "", "")
            cells.append(f"{span(found.ratio, found.low, found.high)}{mark}")
        today = three_digits(a.price.usd_per_hour / b.price.usd_per_hour)
        rows.append([f"{short_name(a.gpu)} / {short_name(b.gpu)}", today, *cells])
    return lean(
        "Break-even price ratio of a / b: below it a is the better buy, whatever the price list",
        ("a / b", "prices", *(count(size) for size in sizes)),
        rows,
        "prices: a / b at the prices above; a, b: the better buy at these, where the interval decides",
    )


def _what_if_table(curves: Sequence[CostCurve], scenarios: Sequence[Mapping[str, Any]]) -> Table:
    sizes = spread_sizes(curves)
    by_case: dict[tuple[float, int], dict[float, str]] = {}
    for row in scenarios:
        cell = short_name(row["gpu"]) + ("" if row["separable"] else " *")
        by_case.setdefault((row["host_factor"], row["batch"]), {})[row["n_params"]] = cell
    base = next(iter(by_case), (1.0, 0))[1]
    rows = [
        [_case(factor, batch, base), *(cells.get(size, "no memory") for size in sizes)]
        for (factor, batch), cells in by_case.items()
    ]
    return lean(
        "Best GPU if things were otherwise",
        ("", *(count(size) for size in sizes)),
        rows,
        "* not separable. No host: the bound with CUDA graphs of these kernels; compiled steps are not modelled yet",
    )


def _case(factor: float, batch: int, base: int) -> str:
    if batch != base:
        return f"batch {batch}"
    if factor == 1.0:
        return "as it is"
    return "no host" if not factor else f"host at {factor:g} x its cost"


def print_prices(found: Sequence[Price]) -> None:
    rows = [
        [p.gpu, p.provider, p.kind, f"{p.usd_per_hour:.4g}", f"{'about ' if p.date_inferred else ''}{p.date}", p.source]
        for p in found
    ]
    made = table("Newest prices, $ per GPU and hour", ("GPU", "provider", "kind", "$/h", "day", "source"), rows)
    for index in (1, 2, 4, 5):
        made.columns[index].justify = "left"
    console().print(made)


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
            rows.append([short_name(plan.gpu), *[NONE] * (7 if budget_usd else 6), plan.reason or ""])
            continue
        bought = None if budget_usd is None else plan.tokens_for(budget_usd)
        rows.append(
            [
                short_name(plan.gpu), str(plan.run.batch), f"{point.tokens_per_second.value:,.0f}",
                f"{plan.mfu or 0.0:.1%}", ranged(seconds, DAY), ranged(usd),
                *([f"{count(bought.value)} ({count(bought.low)}-{count(bought.high)})"] if bought else []),
                three_digits(point.usd_per_million_tokens.value), point.step.bound,
            ]
        )  # fmt: skip
    first = next((plan.point.step for plan in found if plan.point is not None), None)
    model = f"{count(first.n_params)} parameters, {first.depth} layers, " if first else ""
    columns = ["GPU", "batch", "tokens/s", "MFU", "days", "$"]
    columns += [*([f"tokens for ${budget_usd:,.10g}"] if budget_usd else []), "$/Mtoken", "bound by"]
    run = found[0].run
    how = f"sequences of {run.seq}, {run.optimizer}" + (f", {run.accumulate} a step" if run.accumulate > 1 else "")
    out = console()
    title = f"Training {model}on {count(found[0].tokens)} tokens; {how} (90% intervals)"
    out.print(lean(title, columns, rows, PACE))
    for plan in found:
        out.print(f"{short_name(plan.gpu)} ({plan.basis}): {plan.price.label}")
    best = cheapest(found)
    if best is not None:
        plan, rivals = best
        others = f"; by the intervals {', '.join(map(short_name, rivals))} may be cheaper" if rivals else ""
        out.print(f"- least dollars: {short_name(plan.gpu)}{others}")


def largest_document(
    found: Sequence[Largest], curves: Sequence[CostCurve], tokens_per_parameter: float
) -> dict[str, Any]:
    """What `plan --budget-usd X --json` prints without a model."""
    ladder = [{"width": p.step.width, "depth": p.step.depth} for p in curves[0].points] if curves else []
    prices = {
        c.gpu: {"usd_per_hour": c.price.usd_per_hour, "provider": c.price.provider, "date": c.price.date.isoformat()}
        for c in curves
    }
    return {
        "tokens_per_parameter": tokens_per_parameter,
        "ladder": ladder,
        "largest": [asdict(row) for row in found],
        "prices": prices,
    }


def print_largest(found: Sequence[Largest], curves: Sequence[CostCurve], tokens_per_parameter: float, run: Run) -> None:
    """A row a GPU."""
    rows = []
    for row, curve in zip(found, curves, strict=True):
        if row.n_params is None or row.cost_usd is None or row.days is None:
            small = curve.fitting[0].step.n_params if curve.fitting else None
            why = f"{row.limited_by}: the smallest has {count(small)}" if small else row.limited_by
            rows.append([short_name(row.gpu), NONE, NONE, NONE, NONE, why])
            continue
        low = count(row.low) if row.low else f"below {count(curve.fitting[0].step.n_params)}"
        rows.append(
            [
                short_name(row.gpu), f"{count(row.n_params)} ({low}-{count(row.high or row.n_params)})",
                count(row.n_params * tokens_per_parameter), three_digits(row.cost_usd), three_digits(row.days),
                row.limited_by,
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
        out.print(f"{short_name(curve.gpu)} ({curve.basis}): {curve.price.label}")
