"""Draws the roofline of matrix products and attention.

Roofs are a profile's ceilings; points are those of its surfaces or of measurement rows (`roofs.py`). The report shows
`roofline_figure` and `bandwidth.memory_figure`; `both_figures` draws both on one sheet for `flopcast roofline --out`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flopcast.kernels.shapes import DTYPE_BYTES
from flopcast.roofline.base.units import duration, rate, scale, three_digits
from flopcast.roofline.gpu.profile.roofs import (
    BANDWIDTHS,
    MatrixRoof,
    Point,
    Roofs,
    points_of,
    points_of_rows,
    roofs_of,
)
from flopcast.roofline.views.figures.bandwidth import draw_memory, memory_points, memory_words, said_of
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
from flopcast.roofline.views.figures.colours import BLUE, GREY, INK, LIGHT, MARKERS_OF_BACKENDS, PURPLE, RED, SKY, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flopcast.roofline.gpu.profile.profile import Profile


ROOFLINE_TITLE = "Roofline: matrix products and attention"
_BACKEND_NAMES = {"sdpa-cudnn": "cuDNN", "sdpa-flash": "flash", "sdpa-efficient": "efficient", "sdpa-cpu": "torch",
                  "sdpa-math": "math"}  # fmt: skip
_SERIES = {  # how a point is drawn: colour and whether it is filled
    "matrix products": (BLUE, True),
    "matrix products, unaligned": (BLUE, False),
    "attention forward": (RED, True),
    "attention backward": (PURPLE, True),
}


def main_dtype(roofs: Roofs, points: Sequence[Point]) -> str | None:
    """The dtype of most points among those with a roof; without points bf16, or the dtype of the highest roof."""
    known = [roof.dtype for roof in roofs.matrix]
    counts = Counter(p.dtype for p in points if p.dtype in known)
    if counts:
        return counts.most_common(1)[0][0]
    return "bf16" if "bf16" in known else known[0] if known else None


def _series_of(point: Point) -> str:
    if point.op_class == "attention":
        return "attention backward" if point.variant.tokens[0] == "bwd" else "attention forward"
    return "matrix products, unaligned" if point.is_unaligned else "matrix products"


def _sizes(point: Point) -> str:
    """The sizes of a point: m x n x k of a matrix product, heads and tokens of attention."""
    sizes = [f"{2**feature:.0f}" for feature in point.features]
    if point.op_class == "gemm":
        return " x ".join(sizes[:3]) + (f", batch {sizes[3]}" if len(sizes) > 3 else "")
    if point.op_class == "attention" and len(sizes) == 3:
        return f"batch x heads {sizes[0]}, {sizes[1]} query heads a key head, {sizes[2]} tokens"
    return ", ".join(sizes)


# --- the roofline -------------------------------------------------------------------------------------------


@styled
def roofline_figure(
    profile: Profile, rows: Sequence[Row] = (), *, dtype: str | None = None, theme: Theme = LIGHT
) -> Figure | None:
    """Draws achieved FLOP/s of matrix products and attention against FLOPs per byte, under the roofs.

    Points are those of measurement `rows` where there are any, else the profile's. Returns None without roofs.
    """
    roofs, points = roofs_of(profile), points_of_rows(rows) or points_of(profile)
    dtype = dtype or main_dtype(roofs, points)
    if dtype is None or roofs.copy is None or roofs.of(dtype) is None:
        return None
    sheet = new_sheet(6.0)
    shown = draw_roofline(sheet, sheet.axes[0], roofs, points, dtype, theme)
    return finish(sheet, "roofline", ROOFLINE_TITLE, *_roofline_words(roofs, shown, dtype))


def draw_roofline(
    sheet: Sheet, ax: Axes, roofs: Roofs, points: Sequence[Point], dtype: str, theme: Theme
) -> list[Point]:
    """Draws the roofs of all dtypes and the points of `dtype` with cold operands; returns those points."""
    shown = [p for p in points if p.dtype == dtype and p.cache == "cold"]
    main, copy = roofs.of(dtype), roofs.copy
    assert main is not None
    assert copy is not None
    by, unit = scale(main.best.value, "FLOP/s")
    left, right, bottom, top = _frame(roofs, main, shown)
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom / by, top / by))
    is_projected = roofs.basis != "measured"
    labels: list[tuple[float, str, str]] = []
    for roof in sorted(roofs.matrix, key=lambda roof: roof is main):
        labels += _draw_matrix_roof(ax, roof, copy.value, right, by, theme, roof is main, is_projected)
    _draw_bandwidth_roofs(sheet, ax, roofs, left, by, theme, is_projected)
    _draw_floor_of_products(sheet, ax, roofs, main, dtype, (left, bottom), by, theme)
    for roof in roofs.matrix:
        _draw_ridges(ax, roof, by, theme, roof is main)
    _draw_matrix_points(sheet, ax, shown, by, theme, is_projected)
    sheet.label_right(ax, labels, head=f"{unit}\nburst / sustained")
    ax.set_xlabel("arithmetic intensity, FLOP per byte (each operand moved once)")
    ax.set_ylabel(f"achieved {unit}" + (f", points {dtype}" if shown else ""))
    plain_log(ax, "x", (1.0, 3.0))
    plain_log(ax, "y", (1.0,))
    return shown


def _frame(roofs: Roofs, main: MatrixRoof, shown: Sequence[Point]) -> tuple[float, float, float, float]:
    """Limits (left, right, bottom, top) that hold all ridges and points and the label of the memory roof."""
    ridges = [r for roof in roofs.matrix for r in (roof.ridge_memory, roof.ridge_cache) if r]
    left = min([*ridges, *(p.intensity for p in shown)]) / 2.5
    right = max([4 * max(ridges), *(p.intensity for p in shown)]) * 1.4
    rates = [roof.lasting.value for roof in roofs.matrix]
    peaks = [roof.peak.value for roof in roofs.matrix if roof.peak is not None]
    bottom = min([*rates, main.best.value / 50, *(p.flops_per_second for p in shown)]) / 1.6
    return left, right, bottom, 1.5 * max([*peaks, *(roof.best.value for roof in roofs.matrix)])


def _draw_matrix_roof(
    ax: Axes, roof: MatrixRoof, copy: float, right: float, by: float, theme: Theme, is_main: bool, is_projected: bool
) -> list[tuple[float, str, str]]:
    """Draws the roof's lines from their ridge points on; returns its labels (height, words, colour)."""
    colour = theme.of(INK if is_main else GREY)
    dash: Any = (0, (5, 2)) if is_projected else "-"
    lines = ((roof.burst, 1.9 if is_main else 1.1), (roof.sustained, 1.1 if is_main else 0.8))
    for number, width in lines:
        if number is not None:
            ax.plot([number.value / copy, right], [number.value / by] * 2, color=colour, lw=width, ls=dash)
    if roof.burst is not None and roof.sustained is not None:
        edge = min(roof.burst.value, roof.sustained.value) / copy
        ends = (roof.burst.value / by, roof.sustained.value / by)
        ax.fill_between([edge, right], *ends, color=colour, alpha=0.12, lw=0)
    if is_projected and is_main:
        best = roof.best
        ax.fill_between([best.value / copy, right], best.low / by, best.high / by, color=colour, alpha=0.10, lw=0)
    values = " / ".join(three_digits(n.value / by) for n in (roof.burst, roof.sustained) if n is not None)
    labels = [(roof.lasting.value / by, f"{roof.dtype}  {values}", colour)]
    if roof.peak is not None and is_main:
        ax.plot([roof.peak.value / copy / 2, right], [roof.peak.value / by] * 2, color=theme.of(GREY), lw=1.0,
                ls=(0, (1, 2)))  # fmt: skip
        text = f"peak {three_digits(roof.peak.value / by)}, {roof.peak.basis}"
        labels.append((roof.peak.value / by, text, theme.of(GREY)))
    return labels


def _draw_bandwidth_roofs(
    sheet: Sheet, ax: Axes, roofs: Roofs, left: float, by: float, theme: Theme, is_projected: bool
) -> None:
    assert roofs.copy is not None
    top = max(roof.best.value for roof in roofs.matrix)
    dash: Any = (0, (5, 2)) if is_projected else "-"
    read, write, copy = (roofs.bandwidths.get(name) for name in BANDWIDTHS)
    assert copy is not None
    ax.plot([left, top / copy.value], [left * copy.value / by, top / by], color=theme.of(INK), lw=1.9, ls=dash)
    low, high = (copy.low, copy.high) if is_projected else _range([read, write, copy])
    if high > low:
        edges = [left, top / high]
        ax.fill_between(
            edges, [x * low / by for x in edges], [x * high / by for x in edges], color=theme.of(INK), alpha=0.15, lw=0
        )
    words = ", ".join(
        f"{name} {_rate_only(n.value)}" for name, n in (("copy", copy), ("read", read), ("write", write)) if n
    )
    unit = scale(copy.value, "B/s")[1]
    at = left * 1.15
    sheet.label_along(
        ax, (at, at * low / by * 0.94), (2 * at, 2 * at * low / by * 0.94), f"memory {words} {unit}", va="top"
    )
    if roofs.cache is not None and roofs.cache.value > high:
        cache = roofs.cache.value
        ax.plot([left, top / cache], [left * cache / by, top / by], color=theme.of(GREY), lw=1.1, ls=dash)
        sheet.label_along(ax, (at, at * cache / by * 1.02), (2 * at, 2 * at * cache / by * 1.02),
                          f"cache copy, up to {rate(cache, 'B/s')}", color=theme.of(GREY))  # fmt: skip


def _range(numbers: Sequence[Any]) -> tuple[float, float]:
    values = [n.value for n in numbers if n is not None]
    return min(values), max(values)


def _rate_only(value: float) -> str:
    return rate(value, "B/s").split(" ")[0]


def _draw_floor_of_products(
    sheet: Sheet, ax: Axes, roofs: Roofs, main: MatrixRoof, dtype: str, corner: tuple[float, float], by: float,
    theme: Theme,
) -> None:  # fmt: skip
    """Draws the rate of square products in the time of the shortest kernel: n = 1.5 x bytes per element x intensity."""
    if roofs.floor is None:
        return
    left, bottom = corner
    edge, floor = DTYPE_BYTES[dtype] * 1.5, roofs.floor.value

    def reached(intensity: float) -> float:
        return 2 * (edge * intensity) ** 3 / floor

    def at_rate(flops_per_second: float) -> float:
        return float((flops_per_second * floor / 2) ** (1 / 3)) / edge

    start, end = max(left, at_rate(bottom)), at_rate(main.best.value)
    if end <= start:
        return
    xs = [start * (end / start) ** (i / 20) for i in range(21)]
    ax.plot(xs, [reached(x) / by for x in xs], color=theme.of(SKY), lw=1.4, ls=(0, (4, 2)))
    at = start * 1.06
    sheet.label_along(ax, (at / 1.03, reached(at) / by), (at * 1.5, reached(at * 1.5) / by),
                      f"launch floor {duration(floor)}", color=theme.of(SKY))  # fmt: skip


def _draw_ridges(ax: Axes, roof: MatrixRoof, by: float, theme: Theme, is_main: bool) -> None:
    colour = theme.of(INK if is_main else GREY)
    for ridge, face in ((roof.ridge_memory, colour), (roof.ridge_cache, "none")):
        if ridge is not None:
            ax.plot([ridge], [roof.lasting.value / by], "o", ms=5.5 if is_main else 4, mfc=face, mec=colour, zorder=4)
    if is_main and roof.ridge_memory is not None:
        ax.plot([roof.ridge_memory] * 2, [ax.get_ylim()[0], roof.lasting.value / by], color=colour, lw=0.8, ls=":")
        ax.annotate(f"ridge {roof.ridge_memory:.3g} FLOP/B", (roof.ridge_memory, ax.get_ylim()[0]), (4, 4),
                    textcoords="offset points", fontsize=8.2, va="bottom", path_effects=halo())  # fmt: skip


def _draw_matrix_points(
    sheet: Sheet, ax: Axes, shown: Sequence[Point], by: float, theme: Theme, is_projected: bool
) -> None:
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in shown:
        groups[_series_of(point), point.backend].append(point)
    for (series, backend), members in sorted(groups.items(), key=lambda item: list(_SERIES).index(item[0][0])):
        colour, filled = theme.of(_SERIES[series][0]), _SERIES[series][1]
        drawn = apart([p.intensity for p in members], [p.flops_per_second for p in members])
        members = [members[i] for i in drawn]
        tips = [
            f"{series}, {backend}, {p.variant.tokens[0]}, {_sizes(p)}: {rate(p.flops_per_second, 'FLOP/s')}, "
            f"{duration(p.seconds)}{said_of(p)}"
            for p in members
        ]
        sheet.scatter(
            ax, [p.intensity for p in members], [p.flops_per_second / by for p in members], tips, s=15,
            marker=MARKERS_OF_BACKENDS.get(backend, "v"), alpha=0.35 if is_projected else 0.6,
            **mark_fill(colour, is_filled=filled, line=0.9),
        )  # fmt: skip
    _legend_of_points(ax, groups, theme)


def _legend_of_points(ax: Axes, groups: dict[tuple[str, str], list[Point]], theme: Theme) -> None:
    """Draws the legend: colours by class, then markers by backend."""
    handles = [
        legend_mark("o", theme.of(colour), f"{series} ({count:,})", is_hollow=not filled)
        for series, (colour, filled) in _SERIES.items()
        if (count := sum(len(members) for (name, _), members in groups.items() if name == series))
    ]
    names: dict[str, str] = {}
    for _, backend in groups:
        names.setdefault(_BACKEND_NAMES.get(backend, backend), MARKERS_OF_BACKENDS.get(backend, "v"))
    handles += [legend_mark(marker, theme.of(INK), name, is_hollow=True) for name, marker in sorted(names.items())]
    if handles:
        legend_below(ax, handles, 0.13)


def _roofline_words(roofs: Roofs, shown: Sequence[Point], dtype: str) -> tuple[str, str, str]:
    """Returns (caption, alternative text, basis)."""
    main, copy = roofs.of(dtype), roofs.copy
    assert main is not None
    assert copy is not None
    best = max(shown, key=lambda p: p.flops_per_second, default=None)
    fastest = ""
    if best is not None:
        fastest = (
            f" The fastest point reaches {rate(best.flops_per_second, 'FLOP/s')}: {_series_of(best)}, {best.backend}, "
            f"{_sizes(best)}."
        )
    kind = "measured shapes" if roofs.basis == "measured" else "shapes of another GPU, scaled (extrapolated)"
    cache = f", from the cache at {main.ridge_cache:.3g}" if main.ridge_cache else ""
    caption = (
        f"{len(shown)} {kind}, {dtype}, operands from memory (cold), kernel time without launch; of points under one "
        f"another, one is drawn. Filled dots on the "
        f"roofs: ridge points, for {dtype} at {main.ridge_memory:.3g} FLOP per byte{cache} (hollow). A point below all "
        "lines loses to tile and wave quantisation or a slow kernel; near the dashed blue line, to the cost of any "
        "kernel at all."
    )
    top = main.best.value
    alt = (
        f"Log-log roofline of {roofs.gpu}: roofs of {rate(top, 'FLOP/s')} {dtype} and {rate(copy.value, 'B/s')} "
        f"meeting at {top / copy.value:.3g} FLOP per byte, with {len(shown)} {kind} of matrix products and "
        f"attention.{fastest}"
    )
    points = "points measured" if roofs.basis == "measured" else "points extrapolated from another GPU's"
    peak = f"dotted: {main.peak.basis} peak, for reference only" if main.peak else "no datasheet peak known"
    shaded = "; shaded: 90% intervals" if roofs.basis != "measured" else ""
    return caption + fastest, alt, f"{points}; roofs {roofs.basis}{shaded}; {peak}"


# --- both on one sheet --------------------------------------------------------------------------------------


@styled
def both_figures(profile: Profile, *, dtype: str | None = None, theme: Theme = LIGHT) -> Figure | None:
    """Draws the roofline with a heading and, where there are such points, the bandwidths below it, for a file.

    Returns None without roofs of `dtype` (default: the dtype with most points).
    """
    roofs, points = roofs_of(profile), points_of(profile)
    dtype = dtype or main_dtype(roofs, points)
    if dtype is None or roofs.copy is None or roofs.of(dtype) is None:
        return None
    memory = memory_points(points)
    sheet = new_sheet(11.4 if memory else 6.4, rows=2 if memory else 1)
    shown = draw_roofline(sheet, sheet.axes[0], roofs, points, dtype, theme)
    caption, alt, basis = _roofline_words(roofs, shown, dtype)
    if memory:
        draw_memory(sheet, sheet.axes[1], roofs, memory, theme)
        caption, alt = (f"{caption} Below: {memory_words(roofs, memory)[0]}", f"{alt} {memory_words(roofs, memory)[1]}")
    sheet.canvas.suptitle(heading(profile), x=0.01, ha="left", fontsize=11, fontweight="bold")
    return finish(sheet, "roofline", heading(profile), caption, alt, basis)


def heading(profile: Profile) -> str:
    """The heading of a profile: its GPU, basis, software and date."""
    if profile.basis != "measured":
        source = profile.provenance.get("projected_from", "another GPU")
        return f"{profile.device.get('name') or profile.gpu}: EXTRAPOLATED from {source}, not measured"
    when = str(profile.provenance.get("to") or "")[:10]
    torch = profile.stack.get("torch")
    parts = ["measured" + (f" {when}" if when else "")] + ([f"torch {torch}"] if torch else [])
    return f"{profile.device.get('name') or profile.gpu}: {', '.join(parts)}"
