"""Draws FLOPs per dollar: the curves of several GPUs, and how they compare.

The upper panel shows each GPU's FLOPs per dollar, the lower one its ratio to a reference's, in which errors
that both forecasts share have cancelled: a band that does not reach 1 is decisive. Hollow points are bound by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flopcast.roofline.base.units import count, short_name
from flopcast.roofline.dollars.crossovers import crossovers, sentence
from flopcast.roofline.dollars.points import CostCurve, Ranged
from flopcast.roofline.views.figures.canvas import Figure, Sheet, finish, new_sheet, plain_log, styled
from flopcast.roofline.views.figures.colours import BLUE, CARD, GREEN, INK, ORANGE, PURPLE, RED, SKY, YELLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, INK)
PETA = 1e15


@styled
def cost_figure(curves: Sequence[CostCurve], reference: str | None = None) -> Figure | None:
    """Draws FLOPs per dollar against parameters with crossovers, and the ratio of each GPU to `reference` (default: the
    GPU with most common sizes, the last named of these). None without a point that fits and has a price."""
    shown = [curve for curve in curves if curve.fitting and curve.price is not None]
    if not shown:
        return None
    colours = {curve.gpu: COLOURS[i % len(COLOURS)] for i, curve in enumerate(shown)}
    if len(shown) > 1:
        sheet = new_sheet(7.6 + 0.17 * len(shown), rows=2, sharex=True, height_ratios=(3, 2))
        base = _reference(shown, reference)
        _draw_ratios(sheet, sheet.axes[1], shown, base, colours)
    else:
        sheet = new_sheet(5.2)
    upper = sheet.axes[0]
    _draw_curves(sheet, upper, shown, colours)
    _mark_crossovers(sheet, upper, shown)
    upper.set(xscale="log", yscale="log", ylabel="PFLOP per dollar, counted FLOPs")
    plain_log(upper, "y")
    upper.margins(y=0.08)
    parameter_axis(sheet.axes[-1])
    sheet.canvas.legend(loc="outside lower center", ncols=1, labelspacing=0.3)
    spans = "; ".join(
        f"{c.gpu} {c.fitting[0].flops_per_usd.value / PETA:.0f} to {c.fitting[-1].flops_per_usd.value / PETA:.0f}"
        for c in shown
    )
    lower = (
        f" Lower panel: the same over {short_name(_reference(shown, reference).gpu)}, what both forecasts share "
        "cancelled; a band that does not reach 1 decides."
        if len(shown) > 1
        else ""
    )
    caption = (
        "Solid: measured profile; dashed: not measured (projected, published); shaded: 90% intervals; hollow points: "
        f"bound by the host. Higher is cheaper.{lower} Prices move by tens of percent within a year; each is named "
        "with its provider and day."
    )
    alt = f"PFLOP per dollar against parameters, from the smallest to the largest model: {spans}."
    return finish(sheet, "cost", "FLOPs per dollar against model size", caption, alt,
                   "; ".join(f"{c.gpu} {c.basis or 'basis not given'}" for c in shown))  # fmt: skip


def _reference(shown: Sequence[CostCurve], wanted: str | None) -> CostCurve:
    named = next((curve for curve in shown if curve.gpu == wanted), None)
    if named is not None:
        return named
    return max(enumerate(shown), key=lambda pair: (len(pair[1].fitting), pair[0]))[1]


def dashes(curve: CostCurve) -> str | tuple[int, tuple[int, int]]:
    """The line style of a curve: solid where measured, dashed where not."""
    return "-" if curve.basis == "measured" else (0, (5, 2))


def _draw_curves(sheet: Sheet, ax: Axes, shown: Sequence[CostCurve], colours: dict[str, str]) -> None:
    for curve in shown:
        colour = colours[curve.gpu]
        xs = [point.step.n_params for point in curve.fitting]
        rates = [point.flops_per_usd for point in curve.fitting]
        label = f"{curve.gpu} ({curve.basis or 'basis not given'}), {curve.price.label if curve.price else ''}"
        draw_band(ax, xs, rates, colour, by=PETA, ls=dashes(curve), label=label)
        for is_host in (True, False):
            points = [(p, r) for p, r in zip(curve.fitting, rates, strict=True) if (p.step.bound == "host") == is_host]
            if not points:
                continue
            tips = [
                f"{curve.gpu} ({curve.basis}), width {p.step.width} x {p.step.depth}: {r.value / PETA:.3g} PFLOP/$ "
                f"({r.low / PETA:.3g} to {r.high / PETA:.3g}), ${p.usd_per_million_tokens.value:.3g}/Mtoken"
                + (f", bound by {p.step.bound}" if p.step.bound else "")
                for p, r in points
            ]
            sheet.scatter(ax, [p.step.n_params for p, _ in points], [r.value / PETA for _, r in points], tips,
                          s=22, facecolors=CARD if is_host else colour, edgecolors=colour, linewidths=1.2,
                          zorder=3)  # fmt: skip
        if curve.smallest_failing:
            ax.plot(xs[-1], rates[-1].value / PETA, "x", color=colour, ms=9, mew=2.2, zorder=4)
    if any(point.step.bound == "host" for curve in shown for point in curve.fitting):
        ax.scatter([], [], s=22, facecolors=CARD, edgecolors=INK, linewidths=1.2, label="bound by the host")
    if any(curve.smallest_failing for curve in shown):
        ax.plot([], [], "x", color=INK, ms=9, mew=2.2, ls="", label="larger models run out of memory")


def _mark_crossovers(sheet: Sheet, ax: Axes, shown: Sequence[CostCurve]) -> None:
    by_gpu = {curve.gpu: curve for curve in shown}
    marked = False
    for row in crossovers(shown):
        if row.status != "crossover" or not row.n_params:
            continue
        at = by_gpu[row.gpu_a].flops_per_usd_at(row.n_params)
        if at is not None:
            ends = [row.low or row.compared_from or 0.0, row.high or row.compared_to or 0.0]
            ax.plot(ends, [at.value / PETA] * 2, color=INK, lw=1.1, zorder=4)
            sheet.scatter(ax, [row.n_params], [at.value / PETA], [sentence(row)], s=90, facecolors="none",
                          edgecolors=INK, linewidths=1.6, zorder=5)  # fmt: skip
            marked = True
    if marked:
        ax.scatter(
            [], [], s=90, facecolors="none", edgecolors=INK, linewidths=1.6, label="crossover, with its 90% interval"
        )


def _draw_ratios(sheet: Sheet, ax: Axes, shown: Sequence[CostCurve], base: CostCurve, colours: dict[str, str]) -> None:
    """Draws FLOPs per dollar of each GPU over the reference's, at the sizes that both reach."""
    labels = []
    for curve in shown:
        if curve is base:
            continue
        at = [
            (p.step.n_params, p.flops_per_usd.over(other))
            for p in curve.fitting
            if (other := base.flops_per_usd_at(p.step.n_params)) is not None
        ]
        if not at:
            continue
        colour, xs = colours[curve.gpu], [size for size, _ in at]
        ys = draw_band(ax, xs, [r for _, r in at], colour, ls=dashes(curve))
        tips = [
            f"{curve.gpu} over {base.gpu} at {count(size)}: {r.value:.3g} ({r.low:.3g} to {r.high:.3g})"
            for size, r in at
        ]
        sheet.scatter(ax, xs, ys, tips, s=14, color=colour, linewidths=0, zorder=3)
        labels.append((ys[-1], short_name(curve.gpu), colour))
    ax.axhline(1.0, color=colours[base.gpu], lw=1.6, ls=dashes(base))
    labels.append((1.0, short_name(base.gpu), colours[base.gpu]))
    ax.set(xscale="log", yscale="log", ylabel=f"over {short_name(base.gpu)}'s")
    plain_log(ax, "y")
    if labels:
        sheet.label_right(ax, labels)


def parameter_axis(ax: Axes) -> None:
    ax.set_xlabel("parameters")
    plain_log(ax, "x", show=count)


def draw_band(
    ax: Axes, xs: Sequence[float], found: Sequence[Ranged], colour: str, *, by: float = 1.0, **how: Any
) -> list[float]:
    """Draws a line as `how` says and shades its 90% interval; returns the line's heights, divided by `by`."""
    ax.fill_between(xs, [r.low / by for r in found], [r.high / by for r in found], color=colour, alpha=0.12, lw=0)
    heights = [r.value / by for r in found]
    ax.plot(xs, heights, color=colour, lw=2.0, **how)
    return heights
