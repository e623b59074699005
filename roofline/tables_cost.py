"""What the terminal shows of dollars: FLOPs per dollar, break-even prices, what would change, the price book, plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import log
from typing import TYPE_CHECKING, Any

from flopcast.roofline.canvas import count
from flopcast.roofline.tables import NONE, console, parameters, short, table

if TYPE_CHECKING:
    from rich.table import Table

    from flopcast.roofline.cost import CostCurve, Ranged
    from flopcast.roofline.forecast import Run
    from flopcast.roofline.models import Config
    from flopcast.roofline.prices import Price

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
    from flopcast.roofline.cost import best_rows, break_even_rows, cost_rows, crossover_rows, memory_rows

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


def three(value: float) -> str:
    """Three digits, never in powers of ten: 0.0312, 7.04, 107."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def two(value: float) -> str:
    """Two digits, for the ends of intervals: 0.031, 7, 110."""
    return f"{float(f'{value:.2g}'):,.10g}"


def span(value: float, low: float, high: float) -> str:
    """83.2 (56-120)"""
    return f"{three(value)} ({two(low)}-{two(high)})"


def ranged(found: Ranged, unit: float = 1.0) -> str:
    """83.2 (56-120)"""
    return span(found.value / unit, found.low / unit, found.high / unit)


def lean(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
) -> Table:
    """`tables.table` without rules between columns: seven columns of intervals fit into a terminal."""
    from rich.box import SIMPLE_HEAD

    made = table(title, columns, rows, caption)
    made.box, made.padding, made.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
    for column, cells in zip(made.columns, zip(*rows, strict=True), strict=False):
        # narrow terminals break cells at blanks, never inside a number: cut short, (41-84) would read (41-8
        column.min_width = max(
            len(word) for cell in (column.header, *cells) for word in str(cell).split() or [""]
        )
    return made


def print_cost(
    curves: Sequence[CostCurve], run: Run, scenarios: Sequence[Mapping[str, Any]], *, one_host: bool = False
) -> None:
    """The curves, three sizes in full, break-even prices, what would change, and each pair in a sentence."""
    from flopcast.roofline.cost import crossovers, sentence

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
    from flopcast.roofline.cost import best_gpu

    rows = []
    for points in zip(*(curve.points for curve in curves), strict=True):
        step = points[0].step
        cells = [ranged(p.flops_per_usd, PETA) if p.step.fits else "no memory" for p in points]
        best = best_gpu(curves, float(step.n_params))
        leader = NONE if best is None else short(best.gpu) + ("" if best.separable else " *")
        rows.append([f"{step.width} x {step.depth}", parameters(step.n_params), *cells, leader])
    how = f"{run.batch} x {run.seq} tokens, {run.optimizer}, {run.mode}"
    title = f"PFLOP per dollar (90% interval), counted FLOPs; {how}"
    columns = ("width x depth", "parameters", *(short(c.gpu) for c in curves), "best")
    fed = "one host feeds all of them" if one_host else "each stands in a host of its own (--hosts)"
    return lean(
        title, columns, rows, f"* not separable from the next one at these prices and intervals; {fed}"
    )


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
                    count(size), short(curve.gpu), span(s.step_seconds * 1e3, s.low * 1e3, s.high * 1e3),
                    s.bound or NONE, ranged(found.flops_per_second, TERA), ranged(found.flops_per_usd, PETA),
                    ranged(found.usd_per_million_tokens),
                ]
            )  # fmt: skip
    columns = ("parameters", "GPU", "step, ms", "bound by", "TFLOP/s", "PFLOP/$", "$/Mtoken")
    return lean("Steps in full (all in cost.csv, --out)", columns, rows)


def _break_even_table(curves: Sequence[CostCurve]) -> Table:
    from flopcast.roofline.cost import break_even_price_ratio

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
        today = three(a.price.usd_per_hour / b.price.usd_per_hour)
        rows.append([f"{short(a.gpu)} / {short(b.gpu)}", today, *cells])
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
        cell = short(row["gpu"]) + ("" if row["separable"] else " *")
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
        [
            p.gpu,
            p.provider,
            p.kind,
            f"{p.usd_per_hour:.4g}",
            f"{'about ' if p.date_inferred else ''}{p.date}",
            p.source,
        ]
        for p in found
    ]
    made = table(
        "Newest prices, $ per GPU and hour", ("GPU", "provider", "kind", "$/h", "day", "source"), rows
    )
    for index in (1, 2, 4, 5):
        made.columns[index].justify = "left"
    console().print(made)
