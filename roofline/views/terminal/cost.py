"""Prints the output of `flopcast cost`: FLOPs per dollar, steps in full, break-even prices, effects of changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import log
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import NONE, count, parameters, short_name, three_digits
from flopcast.roofline.dollars.crossovers import best_gpu, break_even_price_ratio, crossovers, price_ratio, sentence
from flopcast.roofline.dollars.modes import ByMode, leaders
from flopcast.roofline.dollars.points import ladder_sizes
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.terminal.console import console, print_table

if TYPE_CHECKING:
    from flopcast.roofline.dollars.crossovers import Scenario
    from flopcast.roofline.dollars.points import CostCurve, Ranged, StepPoint

PETA, TERA = 1e15, 1e12
SHOWN_SIZES = 4  # columns of model sizes that fit side by side


def interval(value: float, low: float, high: float) -> str:
    """A value in three digits with the ends of its interval in two: 83.2 (56-120)."""
    ends = (f"{float(f'{end:.2g}'):,.10g}" for end in (low, high))
    return f"{three_digits(value)} ({'-'.join(ends)})"


def ranged(found: Ranged, unit: float = 1.0) -> str:
    """A number divided by `unit`, with its interval: 83.2 (56-120)."""
    return interval(found.value / unit, found.low / unit, found.high / unit)


def spread_sizes(curves: Sequence[CostCurve], most: int = SHOWN_SIZES) -> list[float]:
    """Parameter counts of at most `most` models, evenly spaced in logarithms, the smallest and the largest included."""
    sizes = ladder_sizes(curves)
    if len(sizes) <= most:
        return sizes
    low, step = log(sizes[0]), log(sizes[-1] / sizes[0]) / (most - 1)
    wanted = (low + step * i for i in range(most))
    return sorted({min(sizes, key=lambda size: abs(log(size) - at)) for at in wanted})


def print_cost(curves: Sequence[CostCurve], run: Run, scenarios: Sequence[Scenario], *, one_host: bool = False) -> None:
    """Prints the curves, three sizes in full, break-even prices, effects of changes, and a sentence per pair."""
    _print_curves(curves, run, one_host)
    _print_gpus(curves)
    _print_sizes(curves)
    if len(curves) > 1:
        _print_break_even(curves)
        _print_scenarios(curves, scenarios)
    for row in crossovers(curves):
        console().print(f"- {sentence(row)}")
    for curve in curves:
        if curve.unranked is not None:
            console().print(f"- not ranked: {curve.gpu}, {curve.unranked}")


def print_modes(by_mode: ByMode) -> None:
    """Prints who leads at each size of each mode; nothing without modes."""
    rows: dict[float, dict[str, str]] = {}
    for mode, best in leaders(by_mode):
        mark = "" if best.separable else " *"
        rows.setdefault(best.n_params, {})[mode] = f"{short_name(best.gpu)} {ranged(best.flops_per_usd, PETA)}{mark}"
    if rows:
        cells = [[count(size), *(found.get(mode, NONE) for mode in by_mode)] for size, found in sorted(rows.items())]
        caption = "PFLOP per dollar with its 90% interval; * not separable from another GPU."
        print_table("Who leads, by mode", ("parameters", *by_mode), cells, caption)


def _print_curves(curves: Sequence[CostCurve], run: Run, one_host: bool) -> None:
    rows = []
    for points in zip(*(curve.points for curve in curves), strict=True):
        step = points[0].step
        cells = [
            "no memory" if not p.step.fits else NONE if p.price is None else ranged(p.flops_per_usd, PETA)
            for p in points
        ]
        best = best_gpu(curves, float(step.n_params))
        leader = NONE if best is None else _marked(best.gpu, best.separable)
        rows.append([_sizes(step), parameters(step.n_params), *cells, leader])
    batch = f"{run.batch} x {run.seq} tokens"
    if (run.batch, run.seq) == (Run.batch, Run.seq):
        batch += " as in the source article (--batch, --seq)"
    samples = {point.step.tokens for curve in curves for point in curve.points}
    if samples != {run.tokens}:  # a module's own batch
        batch = f"{max(samples):,} tokens or samples per step"
    how = f"{batch}, {run.optimizer}, {run.mode}"
    title = f"PFLOP per dollar (90% interval), counted FLOPs; {how}"
    columns = ("width x depth", "parameters", *(short_name(c.gpu) for c in curves), "best")
    fed = "one host feeds all of them" if one_host else "each stands in a host of its own (--hosts)"
    caption = f"* not separable from the next one at these prices and intervals; {fed}"
    print_table(title, columns, rows, caption, ruled=False)


def _sizes(step: StepPoint) -> str:
    """Width x depth, of a module what is known of them."""
    known = [str(size) for size in (step.width, step.depth) if size]
    return " x ".join(known) or "the module"


def _marked(gpu: str, is_separable: bool) -> str:
    return short_name(gpu) + ("" if is_separable else " *")


def _print_gpus(curves: Sequence[CostCurve]) -> None:
    rows = []
    for c in curves:
        limit = f"{count(c.memory_limit)} parameters" if c.memory_limit else NONE if c.fitting else "fits none of these"
        rows.append([c.gpu, c.basis or NONE, c.price.label if c.price else NONE, limit])
    print_table("Prices and memory", ("GPU", "profile", "price", "runs out of memory at"), rows, ruled=False)


def _print_sizes(curves: Sequence[CostCurve]) -> None:
    shown = [
        (size, curve.gpu, point)
        for size in spread_sizes(curves, 3)
        for curve in curves
        for point in curve.points
        if point.step.n_params == size and point.step.fits
    ]
    rows = [
        [count(size), short_name(gpu), interval(*(1e3 * v for v in (p.step.step_seconds, p.step.low, p.step.high))),
         p.step.bound or NONE, ranged(p.flops_per_second, TERA),
         *([NONE] * 2 if p.price is None else [ranged(p.flops_per_usd, PETA), ranged(p.usd_per_million_tokens)])]
        for size, gpu, p in shown
    ]  # fmt: skip
    columns = ("parameters", "GPU", "step, ms", "bound by", "TFLOP/s", "PFLOP/$", "$/Mtoken")
    print_table("Steps in full (all in cost.csv, --out)", columns, rows, ruled=False)


def _print_break_even(curves: Sequence[CostCurve]) -> None:
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
            cells.append(f"{interval(found.ratio, found.low, found.high)}{mark}")
        today = price_ratio(a, b)
        names = f"{short_name(a.gpu)} / {short_name(b.gpu)}"
        rows.append([names, NONE if today is None else three_digits(today), *cells])
    title = "Break-even price ratio of a / b: below it a is the better buy, whatever the price list"
    caption = "prices: a / b at the prices above; a, b: the better buy at these, where the interval decides"
    print_table(title, ("a / b", "prices", *map(count, sizes)), rows, caption, ruled=False)


def _print_scenarios(curves: Sequence[CostCurve], scenarios: Sequence[Scenario]) -> None:
    sizes = spread_sizes(curves)
    by_case: dict[tuple[float, int], dict[float, str]] = {}
    for row in scenarios:
        case = by_case.setdefault((row.host_factor, row.batch), {})
        case[row.best.n_params] = _marked(row.best.gpu, row.best.separable)
    base = next(iter(by_case), (1.0, 0))[1]
    nowhere = NONE if any(curve.unranked for curve in curves) else "no memory"
    rows = [
        [_case(factor, batch, base), *(cells.get(size, nowhere) for size in sizes)]
        for (factor, batch), cells in by_case.items()
    ]
    caption = "* not separable. No host: the bound with CUDA graphs of these kernels; --mode forecasts compiled steps"
    print_table("Best GPU if things were otherwise", ("", *map(count, sizes)), rows, caption, ruled=False)


def _case(factor: float, batch: int, base: int) -> str:
    if batch != base:
        return f"batch {batch}"
    if factor == 1.0:
        return "as it is"
    return "no host" if not factor else f"host at {factor:g} x its cost"
