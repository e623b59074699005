"""Draws FLOPs per dollar by mode: a panel each for eager, compiled and captured steps, on the same axes."""

from __future__ import annotations

from flopcast.roofline.base.units import count, short_name
from flopcast.roofline.dollars.modes import ByMode, leaders
from flopcast.roofline.views.figures.canvas import Figure, finish, halo, new_sheet, plain_log, styled
from flopcast.roofline.views.figures.colours import CARD, INK
from flopcast.roofline.views.figures.cost import COLOURS, PETA, dashes, draw_band, parameter_axis

SAID = {
    "eager": "eager",
    "compile": "compile: torch.compile",
    "compile-graphs": "compile-graphs: torch.compile with CUDA graphs (reduce-overhead)",
}


@styled
def modes_figure(by_mode: ByMode) -> Figure | None:
    """FLOPs per dollar against parameters with 90% bands, one panel a mode. None with fewer than two modes."""
    shown = {mode: [c for c in curves if c.fitting and c.price is not None] for mode, curves in by_mode.items()}
    shown = {mode: curves for mode, curves in shown.items() if curves}
    if len(shown) < 2:
        return None
    gpus = list(dict.fromkeys(curve.gpu for curves in shown.values() for curve in curves))
    colours = {gpu: COLOURS[i % len(COLOURS)] for i, gpu in enumerate(gpus)}
    sheet = new_sheet(2.9 * len(shown) + 0.8, rows=len(shown), sharex=True, sharey=True)
    has_host = False
    for ax, (mode, curves) in zip(sheet.axes, shown.items(), strict=True):
        labels = []
        for curve in curves:
            colour, xs = colours[curve.gpu], [point.step.n_params for point in curve.fitting]
            rates = [point.flops_per_usd for point in curve.fitting]
            label = short_name(curve.gpu) if ax is sheet.axes[0] else None
            heights = draw_band(ax, xs, rates, colour, by=PETA, ls=dashes(curve), label=label)
            for is_host in (True, False):
                points = [
                    (p, r) for p, r in zip(curve.fitting, rates, strict=True) if (p.step.bound == "host") == is_host
                ]
                has_host |= is_host and bool(points)
                tips = [
                    f"{curve.gpu} ({curve.basis}), {mode}, width {p.step.width} x {p.step.depth}: {r.value / PETA:.3g} "
                    f"PFLOP/$ ({r.low / PETA:.3g} to {r.high / PETA:.3g}), bound by {p.step.bound}"
                    for p, r in points
                ]
                sheet.scatter(
                    ax, [p.step.n_params for p, _ in points], [r.value / PETA for _, r in points], tips, s=18,
                    facecolors=CARD if is_host else colour, edgecolors=colour, linewidths=1.1, zorder=3,
                )  # fmt: skip
            labels.append((heights[-1], short_name(curve.gpu), colour))
        ax.set(xscale="log", yscale="log", ylabel="PFLOP per dollar")
        plain_log(ax, "y")
        ax.text(0.01, 0.96, SAID.get(mode, mode), transform=ax.transAxes, va="top", fontsize=9.2, fontweight="bold",
                path_effects=halo(), zorder=6)  # fmt: skip
        sheet.label_right(ax, labels)
    if has_host:
        sheet.axes[0].scatter([], [], s=18, facecolors=CARD, edgecolors=INK, linewidths=1.1, label="bound by the host")
    parameter_axis(sheet.axes[-1])
    sheet.canvas.legend(loc="outside lower center", ncols=len(gpus) + 1)
    caption = (
        "The same ladder and prices in each mode, on the same axes; shaded: 90% intervals; hollow points: bound by the "
        "host; dashed: profiles that were not measured. Compiled steps of GPUs other than the H200 are costed by its "
        "law of generated kernels, scaled by datasheets, and none of them was measured."
    )
    alt = "PFLOP per dollar against parameters by mode. " + " ".join(_led(by_mode, mode) for mode in shown)
    basis = "; ".join(f"{c.gpu} {c.basis or 'basis not given'}" for c in next(iter(shown.values())))
    return finish(sheet, "modes", "FLOPs per dollar where steps are compiled", caption, alt, basis)


def _led(by_mode: ByMode, mode: str) -> str:
    """Who leads where, in words: "eager: l4 from 76 M, a100 from 200 M."""
    spans: list[str] = []
    last = ""
    for one in leaders({mode: by_mode[mode]}):
        if one.best.gpu != last:
            last = one.best.gpu
            spans.append(f"{short_name(last)} from {count(one.best.n_params)}")
    return f"{mode}: {', '.join(spans)}."
