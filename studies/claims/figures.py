"""Figures of the claims: each GPU's FLOPs per dollar over the H100's under several prices, and batch against width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flopcast.roofline.base.units import count, short_name
from flopcast.roofline.dollars.points import CostCurve, CostPoint
from flopcast.roofline.views.figures.canvas import Figure, finish, halo, new_sheet, plain_log, styled
from flopcast.roofline.views.figures.colours import CARD, GREY, INK
from flopcast.roofline.views.figures.cost import COLOURS, PETA, dashes, draw_band, parameter_axis
from studies.claims.claims import A100, H100, H200, HALF_BILLION, L4, PriceSet, batch_models, models_of

COLOUR_OF = dict(zip((L4, A100, H100, H200), COLOURS, strict=False))


@styled
def claims_figure(curves: Sequence[CostCurve], price_sets: Sequence[PriceSet]) -> Figure | None:
    """FLOPs per dollar over the H100's against parameters, one panel a price list. None without an H100."""
    if not any(curve.gpu == H100 and curve.fitting for curve in curves):
        return None
    style = {curve.gpu: dashes(curve) for curve in curves}
    sheet = new_sheet(2.05 * len(price_sets) + 0.9, rows=len(price_sets), sharex=True, sharey=True)
    for ax, prices in zip(sheet.axes, price_sets, strict=True):
        models = models_of(curves, prices.prices)
        for gpu in (L4, A100, H200):
            at = [(m.n_params, m.ratio(gpu, H100)) for m in models if gpu in m.points and H100 in m.points]
            if not at:
                continue
            xs, colour = [n for n, _ in at], COLOUR_OF[gpu]
            label = short_name(gpu) if ax is sheet.axes[0] else None
            ys = draw_band(ax, xs, [r for _, r in at], colour, ls=style[gpu], label=label)
            tips = [f"{gpu} over {H100} at {count(n)}: {r.value:.3g} ({r.low:.3g} to {r.high:.3g})" for n, r in at]
            sheet.scatter(ax, xs, ys, tips, s=14, color=colour, linewidths=0, zorder=3)
        ax.axhline(
            1.0, color=COLOUR_OF[H100], lw=1.6, ls=style[H100], label=short_name(H100) if ax is sheet.axes[0] else None
        )
        ax.axvline(HALF_BILLION, color=GREY, lw=1.0, ls=":")
        ax.set(xscale="log", yscale="log", ylabel="over the H100's")
        plain_log(ax, "y", subs=(0.5, 1.0, 2.0, 5.0))
        words = f"{prices.name}: {prices.label}".replace("$", r"\$")  # two of them would set mathematics
        ax.text(
            0.99, 0.95, words, transform=ax.transAxes, ha="right", va="top", fontsize=8.4, path_effects=halo(), zorder=6
        )
    sheet.axes[0].annotate("2^29", (HALF_BILLION, 0.03), (3, 0), xycoords=("data", "axes fraction"),
                           textcoords="offset points", fontsize=8.2, color=INK)  # fmt: skip
    parameter_axis(sheet.axes[-1])
    sheet.canvas.legend(loc="outside lower center", ncols=4)
    caption = (
        "FLOPs per dollar over the H100's, 90% intervals, each GPU in a host of its own. Above 1 the GPU is the better "
        "buy than an H100; of L4 and A100 the higher line. A claim is decided where a band does not reach the line it "
        "is compared with. Dashed: profiles that were not measured."
    )
    alt = "FLOPs per dollar of L4, A100 and H200 over the H100's against parameters, one panel for each price list."
    return finish(sheet, "claims", "The article's claims under four price lists", caption, alt,
                  "forecasts: " + "; ".join(f"{c.gpu} {c.basis}" for c in curves))  # fmt: skip


@styled
def batch_figure(
    curves: Sequence[CostCurve], batches: Mapping[str, Sequence[CostPoint]], prices: PriceSet
) -> Figure | None:
    """FLOPs per dollar against FLOPs a step: by wider models at 1,024 tokens, and by larger batches of one model."""
    wider, larger = models_of(curves, prices.prices), batch_models(batches, prices.prices)
    if not wider or not larger:
        return None
    width = next(iter(larger[0].points.values())).step.width
    sheet = new_sheet(5.4)
    ax = sheet.axes[0]
    for gpu in (L4, A100, H100, H200):
        colour = COLOUR_OF[gpu]
        for models, style, filled, how in ((wider, "-", True, "wider"), (larger, ":", False, "larger batch")):
            points = [m.points[gpu] for m in models if gpu in m.points]
            if not points:
                continue
            xs = [p.step.flops_counted for p in points]
            ys = [p.flops_per_usd.value / PETA for p in points]
            ax.plot(xs, ys, color=colour, lw=1.8, ls=style, label=short_name(gpu) if filled else None)
            tips = [
                f"{gpu}, {how}: width {p.step.width}, {p.step.tokens:,} tokens: {y:.3g} PFLOP/$, "
                f"bound by {p.step.bound}"
                for p, y in zip(points, ys, strict=True)
            ]
            sheet.scatter(ax, xs, ys, tips, s=22, facecolors=colour if filled else CARD, edgecolors=colour,
                          linewidths=1.2, zorder=3)  # fmt: skip
    ax.plot([], [], color=INK, lw=1.8, marker="o", ms=5, label="wider models, 1,024 tokens")
    ax.plot([], [], color=INK, lw=1.8, ls=":", marker="o", ms=5, mfc=CARD, label=f"larger batches, width {width}")
    ax.axvline(6 * HALF_BILLION * 1024, color=GREY, lw=1.0, ls=":")
    ax.set(xscale="log", yscale="log", xlabel="counted FLOPs a step", ylabel="PFLOP per dollar")
    plain_log(ax, "y")
    sheet.canvas.legend(loc="outside lower center", ncols=3)
    caption = (
        f"Solid: wider models of the ladder at 1,024 tokens a step. Dotted: one model (width {width}) at larger "
        "batches, 256 tokens a sequence. Where the two lie on each other, FLOPs a step are what matters. A batch also "
        "spares AdamW and the casts of weights, which a wider model pays for. "
        f"Prices: {prices.name}. Dotted line: 2^41.6 FLOPs, the article's 0.5 B parameters."
    )
    alt = "PFLOP per dollar against counted FLOPs a step, by width and by batch, for L4, A100, H100 and H200."
    return finish(sheet, "batch", "A larger batch in place of a wider model", caption, alt,
                  "forecasts: " + "; ".join(f"{c.gpu} {c.basis}" for c in curves))  # fmt: skip
