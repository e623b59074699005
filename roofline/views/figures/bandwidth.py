"""Draws memory-bound calls: achieved bandwidth over bytes moved, bounded by memory, cache and launch floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flopcast.roofline.base.units import byte_size, duration, rate, scale, three_digits
from flopcast.roofline.gpu.profile.roofs import LEAST_KERNEL_SECONDS, Point, Roofs, points_of, points_of_rows, roofs_of
from flopcast.roofline.views.figures.canvas import (
    Figure,
    Row,
    Sheet,
    apart,
    finish,
    halo,
    legend_below,
    legend_mark,
    mark_fill,
    new_sheet,
    plain_log,
    styled,
)
from flopcast.roofline.views.figures.colours import CLASS_COLOURS, CLASS_LABELS, GREY, INK, LIGHT, SKY, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flopcast.roofline.gpu.profile.profile import Profile


TITLE = "Memory-bound calls: achieved bandwidth"
_CLASS_MARKERS = {"optimizer": "s", "copy": "^", "pointwise": "o", "softmax": "D", "reduction": "v", "rest": "P"}
_LEAST_BYTES = 1024  # smaller calls are not drawn: they take the time of the shortest kernel


@styled
def memory_figure(profile: Profile, rows: Sequence[Row] = (), *, theme: Theme = LIGHT) -> Figure | None:
    """Draws achieved bytes/s of the memory-bound classes against bytes moved.

    Points are chosen as in `roofline_figure`; None without points.
    """
    roofs = roofs_of(profile)
    points = memory_points(points_of_rows(rows) or points_of(profile))
    if not points:
        return None
    sheet = new_sheet(5.6)
    draw_memory(sheet, sheet.axes[0], roofs, points, theme)
    return finish(sheet, "bandwidth", TITLE, *memory_words(roofs, points))


def memory_points(points: Sequence[Point]) -> list[Point]:
    """The points of classes without FLOPs, except those that move under a kilobyte and calls that launch nothing (a
    view's 0.3 ns would read as 1,000 TB/s)."""
    return [p for p in points if not p.flops and p.bytes >= _LEAST_BYTES and p.seconds >= LEAST_KERNEL_SECONDS]


def draw_memory(sheet: Sheet, ax: Axes, roofs: Roofs, points: Sequence[Point], theme: Theme) -> None:
    """Draws the points over bytes moved, under the bandwidths, the working-set sweep and the shortest kernel."""
    is_projected = roofs.basis != "measured"
    by, unit = scale(roofs.copy.value if roofs.copy else max(p.bytes_per_second for p in points), "B/s")
    sizes = [p.bytes for p in points] + [size for size, _ in (*roofs.working_sets, *roofs.cache_reads)]
    left, right = min(sizes) / 1.6, max(sizes) * 1.6
    rates = [p.bytes_per_second for p in points] + [n.value for n in roofs.bandwidths.values()]
    rates += [n.value for _, n in roofs.cache_reads]
    rates += [n.value for _, n in roofs.working_sets]
    bottom, top = min(rates) / 1.6, max([*rates, roofs.reference_bandwidth or 0.0]) * 2.4
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom / by, top / by))
    dash: Any = (0, (5, 2)) if is_projected else "-"
    labels: list[tuple[float, str, str]] = []
    for name, number in roofs.bandwidths.items():
        is_copy = name == "hbm_copy"
        colour = theme.of(INK if is_copy else GREY)
        ax.axhline(number.value / by, color=colour, lw=1.7 if is_copy else 0.9, ls=dash)
        labels.append((number.value / by, f"{name.removeprefix('hbm_')} {three_digits(number.value / by)}", colour))
        if is_copy and is_projected:
            ax.axhspan(number.low / by, number.high / by, color=colour, alpha=0.12, lw=0)
    if roofs.reference_bandwidth:
        value = roofs.reference_bandwidth / by
        ax.axhline(value, color=theme.of(GREY), lw=1.0, ls=(0, (1, 2)))
        labels.append((value, f"datasheet {three_digits(value)}", theme.of(GREY)))
    if roofs.floor is not None:
        floor = roofs.floor.value
        end = min(right, top * floor)
        ax.plot([left, end], [left / floor / by, end / floor / by], color=theme.of(SKY), lw=1.4, ls=(0, (4, 2)))
        at = max(left, bottom * floor) * 1.3
        sheet.label_along(ax, (at, at * 1.12 / floor / by), (at * 4, at * 4.48 / floor / by),
                          f"launch floor {duration(floor)}", color=theme.of(SKY))  # fmt: skip
    _draw_sweeps(ax, roofs, by, unit, theme)
    _draw_memory_points(sheet, ax, points, by, theme, is_projected)
    if labels:
        sheet.label_right(ax, labels, head=f"memory, {unit}")
    ax.set(xlabel="bytes moved by one call", ylabel=f"achieved {unit}")
    from matplotlib.ticker import FuncFormatter

    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: byte_size(value)))
    plain_log(ax, "y", (1.0,))


def said_of(point: Point) -> str:
    """A note on a point's basis where it differs from the caption's "measured"."""
    return "" if point.basis == "measured" else f", {point.basis.removeprefix('measured, ')}"


def _draw_sweeps(ax: Axes, roofs: Roofs, by: float, unit: str, theme: Theme) -> None:
    """Draws bandwidth over working-set sizes, and where the cache ends."""
    ink = theme.of(INK)
    for sweep, name in ((roofs.working_sets, "copy"), (roofs.cache_reads, "read")):
        if not sweep:
            continue
        ax.plot([s for s, _ in sweep], [n.value / by for _, n in sweep], color=ink, lw=1.2, marker=".", ms=5, zorder=3,
                ls="-" if name == "copy" else (0, (3, 1)))  # fmt: skip
        best = max(number.value for _, number in sweep)
        at = next(pair for pair in sweep if pair[1].value >= best / 4)  # to its left nothing is as high
        ax.annotate(
            f"{name} by working set, up to {three_digits(best / by)} {unit}", (at[0], at[1].value / by), (-7, 3),
            textcoords="offset points", fontsize=8.2, ha="right", path_effects=halo(), zorder=6,
        )  # fmt: skip
    low, high = ax.get_xlim()
    if low < roofs.cache_bytes < high:
        ax.axvline(roofs.cache_bytes, color=theme.of(GREY), lw=0.9, ls=":")
        ax.annotate(f"cache {byte_size(roofs.cache_bytes)}", (roofs.cache_bytes, 0.02), (3, 0),
                    xycoords=ax.get_xaxis_transform(), textcoords="offset points", fontsize=8.2, rotation=90,
                    va="bottom", color=theme.of(GREY))  # fmt: skip


def _shown_class(point: Point) -> str:
    return point.op_class if point.op_class in _CLASS_MARKERS else "rest"


def _draw_memory_points(
    sheet: Sheet, ax: Axes, points: Sequence[Point], by: float, theme: Theme, is_projected: bool
) -> None:
    handles = []
    for name, marker in _CLASS_MARKERS.items():
        colour = theme.of(CLASS_COLOURS[name])
        mine = [p for p in points if _shown_class(p) == name]
        for cache in ("hot", "cold"):
            members = [p for p in mine if p.cache == cache]
            if not members:
                continue
            members = [members[i] for i in apart([p.bytes for p in members], [p.bytes_per_second for p in members])]
            tips = [
                f"{p.op_class}, {cache}, {p.variant.tokens[0]}: {byte_size(p.bytes)} in {duration(p.seconds)}, "
                f"{rate(p.bytes_per_second, 'B/s')}{said_of(p)}"
                for p in members
            ]
            sheet.scatter(
                ax, [p.bytes for p in members], [p.bytes_per_second / by for p in members], tips, s=15, marker=marker,
                alpha=0.4 if is_projected else 0.7, **mark_fill(colour, is_filled=cache == "cold", line=0.7),
            )  # fmt: skip
        if mine:
            label = f"{CLASS_LABELS[name].split(' (')[0]} ({len(mine):,})"
            handles.append(legend_mark(marker, colour, label, mew=0))
    for cache, words in (("cold", "cold: from memory"), ("hot", "hot: from the cache")):
        if any(p.cache == cache for p in points):
            handles.append(legend_mark("o", theme.of(GREY), words, is_hollow=cache == "hot"))
    legend_below(ax, handles, 0.14)


def memory_words(roofs: Roofs, points: Sequence[Point]) -> tuple[str, str, str]:
    """Returns (caption, alternative text, basis)."""
    kind = "measured calls" if roofs.basis == "measured" else "calls of another GPU, scaled (extrapolated)"
    caption = (
        f"{len(points)} {kind}. Filled: operands from memory (cold); hollow: found in the cache (hot). Large "
        "calls of a class level out at different bandwidths: casts, broadcasts and row reductions have their own. "
        "Not drawn: calls that move less than 1 kB, and of points under one another all but one."
    )
    level = f" of {rate(roofs.copy.value, 'B/s')}" if roofs.copy else ""
    alt = (
        f"Log-log scatter of achieved bandwidth against bytes moved on {roofs.gpu}: rising along the launch floor, "
        f"then levelling out near the copy bandwidth{level}."
    )
    basis = "points and lines measured" if roofs.basis == "measured" else "points and lines extrapolated"
    return (caption, alt, basis + ("; dotted: datasheet, for reference only" if roofs.reference_bandwidth else ""))
