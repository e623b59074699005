"""Draws the sawtooth of throughput over hidden sizes, and forecast penalties of sizes against measured ones.

`sawtooth_figure(points, profile)` takes what `sawtooth.sawtooth_points` or `penalties.survey` give;
`penalty_figure(checks, gpu)` the checks with real steps that `width_checks` reads (reports/<gpu>/widths-3.csv). Both
return a `canvas.Figure`, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from flopcast.roofline.base.units import count
from flopcast.roofline.views.figures.canvas import Figure, Sheet, finish, halo, legend_mark, new_sheet, styled
from flopcast.roofline.views.figures.colours import (
    BLUE,
    BROWN,
    EDGE,
    GREEN,
    GREY,
    INK,
    LIGHT,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    Theme,
)
from flopcast.roofline.views.figures.width_checks import NEAR, SizeCheck
from flopcast.roofline.widths.penalties import MULTIPLES, TOP_MULTIPLE, Point
from flopcast.roofline.widths.sawtooth import TILE, wave_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flopcast.roofline.gpu.profile.profile import Profile


COLOURS = {256: BLUE, 128: SKY, 64: GREEN, 32: YELLOW, 16: ORANGE, 8: RED, 4: PURPLE, 2: GREY, 1: INK}
MARKERS = {256: "o", 128: "o", 64: "o", 32: "s", 16: "s", 8: "D", 4: "^", 2: "v", 1: "x"}
_BANDS = (1e7, 2e7, 5e7, 1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2e10, 5e10, 1e11)
_WAVES_SHOWN = 12


@styled
def sawtooth_figure(points: Sequence[Point], profile: Profile, *, theme: Theme = LIGHT) -> Figure | None:
    """Draws useful FLOP/s over hidden size, of the matrix products (upper) and of the step (lower): one series per
    largest power of two that divides the size, dotted lines where a wave of tiles is full, background shaded by
    parameters."""
    known = sorted(points, key=lambda p: p.value)
    if not known:
        return None
    sheet = new_sheet(7.0, rows=2, sharex=True)
    low, high = known[0].value, known[-1].value
    pad = max(1.0, 0.02 * (high - low))
    tops = []
    for ax, title, of in zip(
        sheet.axes, ("matrix products, TFLOP/s", "whole step, useful TFLOP/s"), (_products, _step), strict=True
    ):
        values = {p.value: of(p) / 1e12 for p in known}
        for multiple in reversed(MULTIPLES):
            mine = [p for p in known if p.multiple == multiple]
            if not mine:
                continue
            colour, marker = COLOURS[multiple], MARKERS[multiple]
            xs, ys = [p.value for p in mine], [values[p.value] for p in mine]
            ax.plot(xs, ys, color=colour, lw=1.0, alpha=0.55, zorder=2)
            tips = [_tip(p, values[p.value]) for p in mine]
            sheet.scatter(
                ax, xs, ys, tips, s=22, marker=marker, zorder=3, label=_label(multiple), **_fill(marker, colour)
            )
        ax.set(ylabel=title, xlim=(low - pad, high + pad), ylim=(0, 1.16 * max(values.values())))
        tops.append(max(values.values()))
        _shade(ax, known, is_named=ax is sheet.axes[0])
    tokens = known[0].tokens
    waves = wave_ends(tokens, int(profile.device.get("sm_count") or 132), low, high)
    for ax in sheet.axes:
        for wave, width in waves[:: max(1, -(-len(waves) // _WAVES_SHOWN))]:
            ax.axvline(width, color=theme.of(EDGE), lw=0.8, ls=(0, (1, 2)), zorder=1)
            if ax is sheet.axes[1]:
                ax.annotate(f"{wave}", (width, 0.0), (0, 3), textcoords="offset points", fontsize=7.5, ha="center",
                            color=theme.of(EDGE), path_effects=halo())  # fmt: skip
    sheet.axes[1].set(xlabel="hidden size")
    handles, names = sheet.axes[0].get_legend_handles_labels()
    sheet.canvas.legend(
        handles, names, loc="outside lower center", ncols=5, title="largest power of two that divides it",
        fontsize=8.5, title_fontsize=8.5, frameon=False,
    )  # fmt: skip
    loss = _losses(known)
    caption = (
        f"One training step of {tokens:,} tokens. Dotted: where {TILE[0]} x {TILE[1]} tiles of a product of all tokens "
        "and this width just fill their waves over the multiprocessors (wave number below). Shaded: parameters. "
        + " ".join(loss)
    )
    alt = (
        f"Two panels of throughput against hidden sizes {low} to {high}, a series for each power of two: products "
        f"reach {tops[0]:.0f} TFLOP/s, the step {tops[1]:.0f}. {' '.join(loss)}"
    )
    return finish(
        sheet, "sawtooth", "Throughput against width", caption, alt, f"forecast from a {profile.basis} profile"
    )


def _products(p: Point) -> float:
    seconds = sum(p.layout_seconds.values())
    return sum(p.layout_flops.values()) / seconds if seconds else 0.0


def _step(p: Point) -> float:
    return p.flops_per_second


def _label(multiple: int) -> str:
    return f"{multiple} and more" if multiple == TOP_MULTIPLE else str(multiple)


def _tip(p: Point, value: float) -> str:
    return (
        f"{p.value} ({_label(p.multiple)}): {value:.0f} TFLOP/s, step {p.step_seconds * 1e3:.2f} ms, "
        f"{count(p.n_params)} parameters"
    )


def _fill(marker: str, colour: str) -> dict[str, str]:
    """The fill of a marker; a cross has no face to fill."""
    return {"c": colour} if marker == "x" else {"facecolors": colour, "edgecolors": "none"}


def _losses(points: Sequence[Point]) -> list[str]:
    """The median losses of sizes of low multiples against the nearest multiple of 64, in words."""
    aligned = [p for p in points if p.multiple >= 64]
    if not aligned:
        return []
    words = []
    for multiple in (8, 4, 1):
        mine = [p for p in points if p.multiple == multiple]
        if mine:
            near = [min(aligned, key=lambda a, p=p: abs(a.value - p.value)) for p in mine]  # type: ignore[misc]
            loss = median(1 - p.flops_per_second / a.flops_per_second for p, a in zip(mine, near, strict=True))
            kind = "Odd sizes" if multiple == 1 else f"Those of {multiple}"
            words.append(f"{kind} lose {loss:.0%} of the step's throughput at the median.")
    return words


def _shade(ax: Axes, points: Sequence[Point], *, is_named: bool) -> None:
    """Shades bands of the background by parameters, each labelled at its upper edge."""
    left, right = ax.get_xlim()
    edges: list[tuple[float, float]] = []  # interpolated sizes at which the model passes a limit
    for limit in _BANDS:
        for a, b in pairwise(points):
            if a.n_params < limit <= b.n_params:
                share = (limit - a.n_params) / (b.n_params - a.n_params)
                edges.append((a.value + share * (b.value - a.value), limit))
                break
    places = [left, *(x for x, _ in edges), right]
    limits = [None, *(limit for _, limit in edges), None]
    for i, (start, end) in enumerate(pairwise(places)):
        ax.axvspan(start, end, color=BROWN, alpha=0.03 + 0.05 * (i % 2), lw=0, zorder=0)
        if not is_named or (end - start) < 0.07 * (right - left):
            continue
        below, above = limits[i], limits[i + 1]
        if below and above:
            name = f"{count(below)} to {count(above)}"
        elif above:
            name = f"under {count(above)}"
        elif below:
            name = f"over {count(below)}"
        else:
            name = f"{count(points[0].n_params)} to {count(points[-1].n_params)}"
        ax.text((start + end) / 2, 0.985, name, transform=ax.get_xaxis_transform(), ha="center", va="top",
                fontsize=8.0, path_effects=halo())  # fmt: skip


@styled
def penalty_figure(checks: Sequence[SizeCheck], gpu: str, *, theme: Theme = LIGHT) -> Figure | None:
    """Draws forecast against measured penalty of each unaligned size (percent, symmetric log scale), and below it their
    difference (percentage points; differences that are small enough are shaded). Bars are 90% intervals of the
    forecast; all sets but the newest are faint. None without checks."""
    if not checks:
        return None
    sheet = new_sheet(7.6, rows=2, sharex=True, height_ratios=(2.0, 1.0))
    upper, lower = sheet.axes
    sets = sorted({check.set for check in checks})
    values = [100 * value for check in checks for value in (check.penalty_forecast, check.penalty_measured)]
    least, most = min(-2.0, 1.3 * min(values)), 1.3 * max(values)
    upper.set_xscale("symlog", linthresh=5.0, linscale=1.2)
    upper.set_yscale("symlog", linthresh=5.0, linscale=1.2)
    upper.plot([least, most], [least, most], color=theme.of(GREY), lw=1.0, zorder=1)
    lower.axhspan(-100 * NEAR, 100 * NEAR, color=theme.of(GREY), alpha=0.2, lw=0, zorder=0)
    lower.axhline(0.0, color=theme.of(GREY), lw=1.0, zorder=1)
    for multiple in reversed(MULTIPLES):
        for name in sets:
            mine = [check for check in checks if (check.multiple, check.set) == (multiple, name)]
            if mine:
                _penalty_marks(sheet, mine, multiple, theme, is_faint=name != sets[-1])
    ticks = [t for t in (-5, -2, 0, 2, 5, 10, 20, 50, 100, 200, 500) if least <= t <= most]
    for axis in (upper.xaxis, upper.yaxis):
        axis.set_ticks(ticks, [f"{t:+d}%" if t else "0" for t in ticks])
        axis.set_ticks([], minor=True)
    upper.set(ylabel="forecast penalty", xlim=(least, most), ylim=(least, most))
    lower.set(xlabel="measured penalty", ylabel="forecast - measured, points")
    handles = [
        legend_mark(MARKERS[multiple], COLOURS[multiple], _label(multiple), ms=5.5)
        for multiple in MULTIPLES
        if any(check.multiple == multiple for check in checks)
    ]
    upper.legend(
        handles=handles, title="largest power of two\nthat divides the size", title_fontsize=8.5, loc="upper left"
    )
    words = [_came(name, [check for check in checks if check.set == name]) for name in reversed(sets)]
    caption = (
        f"What unaligned sizes cost the device against the line between their neighbours that are multiples of 64, in "
        f"real steps on {gpu}. {' '.join(words)} Bars: 90% intervals of the forecast; shaded below: {100 * NEAR:g} "
        "points." + (f" Faint: {_named(sets[:-1])}." if sets[1:] else "")
    )
    alt = f"Forecast against measured penalties of {len(checks)} widths, with the differences below; {caption}"
    before = [name for name in sets if name != "1"]  # later profiles forecast set 1 too
    basis = "measured across; forecast up" + (
        f", {_named(before)} before any step ran" + (", set 1 by the profile of now" if "1" in sets else "")
        if before
        else ", by the profile of now"
    )
    return finish(sheet, "penalties", "Penalties of widths, forecast and measured", caption, alt, basis)


def _named(sets: Sequence[str]) -> str:
    return f"set{'s' if sets[1:] else ''} {' and '.join(sets)}"


def _penalty_marks(sheet: Sheet, checks: Sequence[SizeCheck], multiple: int, theme: Theme, *, is_faint: bool) -> None:
    """Draws the marks of one multiple and set, in both panels."""
    colour, marker = theme.of(COLOURS[multiple]), MARKERS[multiple]
    alpha = 0.35 if is_faint else 1.0
    measured, forecast, low, high = (
        [100 * getattr(check, f"penalty_{name}") for check in checks]
        for name in ("measured", "forecast", "low", "high")
    )
    tips = [
        f"{check.neighbourhood} {check.value} (set {check.set}): measured {m:+.1f}%{_spread(check)}, forecast {f:+.1f}%"
        for check, m, f in zip(checks, measured, forecast, strict=True)
    ]
    for ax, shift in ((sheet.axes[0], [0.0] * len(checks)), (sheet.axes[1], measured)):
        below, above = ([value - by for value, by in zip(found, shift, strict=True)] for found in (low, high))
        ax.vlines(measured, below, above, color=colour, lw=0.9, alpha=0.5 * alpha, zorder=2)
        ys = [value - by for value, by in zip(forecast, shift, strict=True)]
        sheet.scatter(ax, measured, ys, tips, s=30, marker=marker, zorder=3, alpha=alpha, **_fill(marker, colour))


def _spread(check: SizeCheck) -> str:
    return "" if check.penalty_spread is None else f" ± {100 * check.penalty_spread:.1f}"


def _came(name: str, checks: Sequence[SizeCheck]) -> str:
    """Describes how near the forecasts of a set came."""
    errors = sorted(100 * abs(check.penalty_error) for check in checks)
    return (
        f"Of set {name}, {sum(check.is_near for check in checks)} of {len(errors)} were forecast within "
        f"{100 * NEAR:g} points; median {median(errors):.2g}, worst {errors[-1]:.3g}."
    )
