"""Provides the canvas of the report's figures, and converts matplotlib's output for a page.

A figure is drawn once and kept twice, as an SVG that goes into the page (`svg.py`; hovering a point shows its values)
and as a PNG file. The same data give the same bytes: no dates, no random ids.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import atan2, degrees, log10
from typing import TYPE_CHECKING, Any, NamedTuple

from flopcast.roofline.views.figures.colours import CARD, DARK_COLOURS, INK, LIGHT
from flopcast.roofline.views.figures.svg import OUTLINE, OUTLINED, alone, inline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


Row = Mapping[str, Any]

WIDTH = 7.4  # inches; with 10-point type, legible on a phone too once scrolled


@dataclass(frozen=True)
class Figure:
    """One figure. `svg` goes into the page, `png` beside it; `basis` says where its numbers come from."""

    name: str
    title: str
    caption: str
    alt: str
    basis: str
    svg: str
    png: bytes

    @property
    def svg_file(self) -> str:
        """The SVG as a file of its own, its colours resolved."""
        return alone(self.svg)


class Layer(NamedTuple):
    """A layer of stacked bars: the height and the hover text of each bar."""

    label: str
    colour: str
    heights: Sequence[float]
    tips: Sequence[str]


@dataclass
class Sheet:
    """A canvas being drawn, with the hover texts of its point clouds by SVG id (for an image's cells also `columns`),
    and the labels that are placed once the layout is known."""

    canvas: Canvas
    axes: list[Axes]
    tips: dict[str, list[str]] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    late: list[Callable[[], None]] = field(default_factory=list)

    def scatter(self, ax: Axes, xs: Sequence[float], ys: Sequence[float], tips: Sequence[str], **how: Any) -> Any:
        points = ax.scatter(xs, ys, **how)
        name = f"tips{len(self.tips)}"
        points.set_gid(name)
        self.tips[name] = list(tips)
        return points

    def bars(
        self, ax: Axes, spans: Sequence[tuple[float, float]], at: tuple[float, float], tips: Sequence[str], **how: Any
    ) -> None:
        """Draws bars from x on over a width, `spans`, all from y on over a height, `at`."""
        drawn = ax.broken_barh(spans, at, **how)
        name = f"tips{len(self.tips)}"
        drawn.set_gid(name)
        self.tips[name] = list(tips)

    def diamonds(self, ax: Axes, xs: Sequence[float], ys: Sequence[float], tips: Sequence[str], label: str) -> None:
        """Draws marks of measured values on bars of forecast ones."""
        self.scatter(ax, xs, ys, tips, s=30, marker="D", facecolors=CARD, edgecolors=INK, linewidths=1.5, zorder=5,
                     label=label)  # fmt: skip

    def stack(self, ax: Axes, number: int, layers: Iterable[Layer], width: float) -> list[float]:
        """Draws `number` bars at 0, 1, ..., stacking their layers from below; returns the bars' heights."""
        tops = [0.0] * number
        for layer in layers:
            name = f"tips{len(self.tips)}"
            bars = ax.bar(range(number), layer.heights, width, tops, color=layer.colour, label=layer.label, linewidth=0)
            for index, bar in enumerate(bars):
                bar.set_gid(f"{name}-{index}")
                self.tips[f"{name}-{index}"] = [layer.tips[index]]
            self.tips.setdefault(name, [])
            tops = [top + height for top, height in zip(tops, layer.heights, strict=True)]
        return tops

    def image(self, ax: Axes, cells: Any, tips: Sequence[str], **how: Any) -> Any:
        """Draws cells[rows, columns] as an image, first row at the bottom, with a hover text per cell, row by row."""
        drawn = ax.imshow(cells, origin="lower", interpolation="none", **how)
        name = f"tips{len(self.tips)}"
        drawn.set_gid(name)
        self.tips[name] = list(tips)
        self.columns[name] = len(cells[0])
        return drawn

    def label_along(self, ax: Axes, at: tuple[float, float], ahead: tuple[float, float], text: str, **how: Any) -> None:
        """Writes along a line, from `at` towards `ahead` (both in data units), whatever the axes' scales."""
        how = {"va": "bottom", "ha": "left", "fontsize": 8.2, "zorder": 6, "path_effects": halo(), **how}
        words = ax.text(*at, text, rotation_mode="anchor", **how)
        words.set_in_layout(False)  # its rotation would change the layout that its angle depends on

        def turn() -> None:
            (x0, y0), (x1, y1) = ax.transData.transform([at, ahead])
            words.set_rotation(degrees(atan2(y1 - y0, x1 - x0)))

        self.late.append(turn)

    def label_right(
        self, ax: Axes, labels: Sequence[tuple[float, str, str]], size: float = 8.2, head: str = ""
    ) -> None:
        """Writes (height in data units, words, colour) right of the axes, pushed apart where they would overlap."""
        ordered = sorted(labels, key=lambda label: label[0])
        made = [
            (y, ax.annotate(text, (1.0, y), (1.025, y), xycoords=ax.get_yaxis_transform(), fontsize=size,
                            textcoords=ax.get_yaxis_transform(), color=colour, va="center", annotation_clip=False,
                            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 0,
                                        "relpos": (0, 0.5)}))
            for y, text, colour in ordered
        ]  # fmt: skip
        if head:
            ax.annotate(head, (1.025, 1.0), xycoords="axes fraction", fontsize=size, va="top")

        def spread() -> None:
            step = size * 1.22 * self.canvas.dpi / 72
            wanted = [float(ax.transData.transform((1.0, y))[1]) for y, _ in made]
            placed = spread_apart(wanted, step)
            for (_, words), height in zip(made, placed, strict=True):
                words.set_y(float(ax.transData.inverted().transform((0.0, height))[1]))

        self.late.append(spread)


CELL = 0.025  # decades, about half a mark's width: points nearer to each other than this hide under one mark


def apart(xs: Sequence[float], ys: Sequence[float]) -> list[int]:
    """Chooses which points to draw on two logarithmic axes: the first in each square cell of CELL decades per side.

    9,400 marks of one GPU's matrix products and attention are 1.3 MB of page, and half of them lie under others.
    """
    cells: dict[tuple[int, int], int] = {}
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        cells.setdefault((round(log10(x) / CELL), round(log10(y) / CELL)), index)
    return sorted(cells.values())


def mark_fill(colour: str, *, is_filled: bool, line: float) -> dict[str, Any]:
    """Arguments of `scatter` for marks that are filled, or hollow with an edge of `line` points."""
    return {"color": colour, "linewidths": 0} if is_filled else {
        "facecolors": "none", "edgecolors": colour, "linewidths": line}  # fmt: skip


def legend_mark(marker: str, colour: str, label: str, *, is_hollow: bool = False, **how: Any) -> Any:
    """A legend entry that shows a mark alone."""
    from matplotlib.lines import Line2D

    how = {"ms": 6, "mec": colour, "mfc": "none" if is_hollow else colour, **how}
    return Line2D([], [], ls="", marker=marker, label=label, **how)


def legend_below(ax: Axes, handles: Sequence[Any], drop: float) -> None:
    """Draws a legend in four columns below the axes, at a distance of `drop` times their height."""
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -drop), ncols=4, columnspacing=1.4,
              handletextpad=0.2, labelspacing=0.4)  # fmt: skip


def halo() -> list[Any]:
    """An outline in the background's colour around letters, so that text on lines and points stays legible."""
    import matplotlib as mpl
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=OUTLINE, foreground=mpl.rcParams["axes.facecolor"])]


def spread_apart(wanted: Sequence[float], step: float) -> list[float]:
    """Heights at least `step` apart, in the order of the wanted ones (ascending) and as near to them as possible."""
    from scipy.optimize import isotonic_regression

    room = [step * place for place in range(len(wanted))]  # less this, heights need only keep their order
    kept = isotonic_regression([height - below for height, below in zip(wanted, room, strict=True)]).x
    return [float(height + below) for height, below in zip(kept, room, strict=True)]


def new_sheet(height: float, rows: int = 1, **how: Any) -> Sheet:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
    axes = canvas.subplots(rows, 1, squeeze=False, **how)
    return Sheet(canvas, list(axes[:, 0]))


def finish(sheet: Sheet, name: str, title: str, caption: str, alt: str, basis: str) -> Figure:
    import matplotlib as mpl
    from matplotlib.text import Text

    svg, png = io.StringIO(), io.BytesIO()
    if sheet.late:  # labels along lines or beside them need the layout
        sheet.canvas.draw_without_rendering()
        for place in sheet.late:
            place()
    sheet.canvas.savefig(png, format="png", dpi=160, metadata={"Software": None})
    for words in sheet.canvas.findobj(Text):
        if words.get_path_effects():  # of an SVG these make paths; `inline` has the same outline for letters
            words.set(path_effects=[], gid=OUTLINED)
    sheet.canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    own = inline(
        svg.getvalue(), name, alt, sheet.tips, list(DARK_COLOURS), sheet.columns, mpl.rcParams["axes.facecolor"]
    )
    return Figure(name, title, caption, alt, basis, own, png.getvalue())


def styled(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    """Makes `draw` use the style of `colours` for its keyword `theme`, whatever the user's matplotlibrc says."""

    def within(*args: Any, **kwargs: Any) -> Figure | None:
        import matplotlib as mpl

        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(kwargs.get("theme", LIGHT).style)
            return draw(*args, **kwargs)

    return within


def plain_log(
    ax: Axes, which: str, subs: Sequence[float] = (1.0, 2.0, 5.0), show: Callable[[float], str] = "{:,.10g}".format
) -> None:
    """Labels a logarithmic axis with 10, 20, 50 in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=list(subs)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axis.set_minor_formatter(NullFormatter())
