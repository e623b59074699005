"""What the report's figures are drawn on: style, colours, number words, and the way from matplotlib into a page.

A figure is drawn once and kept twice, as an SVG that goes into the page (`svg.py`; hovering a point shows its values)
and as a PNG file. Colours are Okabe and Ito's, told apart by colour-blind readers; each has a lighter one for dark
ground, which the page's SVG takes by itself (CSS variables) and a file takes on request (`theme=DARK`).
The same data give the same bytes: no dates, no random ids.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import atan2, degrees, log10
from typing import TYPE_CHECKING, Any

from flopcast.roofline.views.figures.svg import alone, inline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


Row = Mapping[str, Any]

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, INK, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#d8c51c", "#22262b", "#8a9099",
)  # fmt: skip
CARD = "#fcfcfb"
WIDTH = 7.4  # inches; with 10-point type, legible on a phone too once scrolled
EDGE, GRID, BROWN = "#5b626b", "#dfe2e6", "#6b4e00"
# What each colour is on dark ground; `report.css` says the same to the page.
DARK_COLOURS = {
    BLUE: "#58aee8", ORANGE: "#efb13d", GREEN: "#2fc295", RED: "#f08a4b", PURPLE: "#dd9cbf", SKY: "#8fd0f5",
    YELLOW: "#e8da5a", INK: "#e6e8eb", GREY: "#98a0aa", CARD: "#1d2126", EDGE: "#9aa3ad", GRID: "#343a42",
    BROWN: "#d0b36a",
}  # fmt: skip


@dataclass(frozen=True)
class Theme:
    """A ground, and what the light ground's colours are on it."""

    name: str
    colours: Mapping[str, str] = field(default_factory=dict)

    def of(self, colour: str) -> str:
        return self.colours.get(colour, colour)

    @property
    def style(self) -> Any:  # matplotlib types its keys one by one
        card, ink = self.of(CARD), self.of(INK)
        return {
            "figure.facecolor": card, "axes.facecolor": card, "savefig.facecolor": card, "text.color": ink,
            "axes.edgecolor": self.of(EDGE), "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink,
            "axes.spines.top": False, "axes.spines.right": False, "font.size": 10.0, "axes.titlesize": 10.0,
            "legend.fontsize": 8.8, "legend.frameon": False, "axes.grid": True, "grid.color": self.of(GRID),
            "grid.linewidth": 0.6, "axes.axisbelow": True, "svg.hashsalt": "flopcast", "svg.fonttype": "none",
            "path.simplify": False,
        }  # fmt: skip


LIGHT, DARK = Theme("light"), Theme("dark", DARK_COLOURS)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}
CLASS_COLOURS = {
    "gemm": BLUE, "attention": SKY, "optimizer": ORANGE, "copy": GREEN, "pointwise": YELLOW, "softmax": PURPLE,
    "reduction": RED, "rest": GREY,
}  # fmt: skip
CLASS_LABELS = {
    "gemm": "matrix products", "attention": "attention", "optimizer": "optimizer", "copy": "casts and copies",
    "pointwise": "element-wise", "softmax": "softmax", "reduction": "reductions",
    "rest": "rest (loss, embedding, cat, fill, other)", "embedding": "embedding", "loss": "loss",
}  # fmt: skip
MARKERS_OF_BACKENDS = {"torch": "o", "triton": "^", "sdpa-cudnn": "s", "sdpa-flash": "D", "sdpa-cpu": "s"}


@dataclass(frozen=True)
class Figure:
    """One figure. `svg` goes into the page, `png` beside it; `basis`: where its numbers come from."""

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


@dataclass
class Sheet:
    """A canvas being drawn, the hover texts of its point clouds by SVG id (of an image's cells with their `columns`),
    and what is placed once sizes are known."""

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
        self, ax: Axes, places: Sequence[float], heights: Sequence[float], tips: Sequence[str], **how: Any
    ) -> None:
        """Bars (`Axes.bar`'s arguments in `how`) with hover texts."""
        name = f"tips{len(self.tips)}"
        for index, bar in enumerate(ax.bar(places, heights, **how)):
            bar.set_gid(f"{name}-{index}")
            self.tips[f"{name}-{index}"] = [tips[index]]
        self.tips.setdefault(name, [])

    def image(self, ax: Axes, cells: Any, tips: Sequence[str], **how: Any) -> Any:
        """An image of cells[rows, columns], first row at the bottom, with a hover text a cell, row by row."""
        drawn = ax.imshow(cells, origin="lower", interpolation="none", **how)
        name = f"tips{len(self.tips)}"
        drawn.set_gid(name)
        self.tips[name] = list(tips)
        self.columns[name] = len(cells[0])
        return drawn

    def label_along(self, ax: Axes, at: tuple[float, float], ahead: tuple[float, float], text: str, **how: Any) -> None:
        """Words on a line: starting at `at`, turned towards `ahead` (both in data units), whatever the axes' scales."""
        how = {"va": "bottom", "ha": "left", "fontsize": 8.2, "zorder": 6, "path_effects": halo(), **how}
        words = ax.text(*at, text, rotation_mode="anchor", **how)
        words.set_in_layout(False)  # its turn would change the layout that its angle comes from

        def turn() -> None:
            (x0, y0), (x1, y1) = ax.transData.transform([at, ahead])
            words.set_rotation(degrees(atan2(y1 - y0, x1 - x0)))

        self.late.append(turn)

    def label_right(
        self, ax: Axes, labels: Sequence[tuple[float, str, str]], size: float = 8.2, head: str = ""
    ) -> None:
        """(height in data units, words, colour) right of the axes, pushed apart where they would overlap."""
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


CELL = 0.025  # decades, about half a mark's width: what lies nearer than this hides under one mark


def apart(xs: Sequence[float], ys: Sequence[float]) -> list[int]:
    """Of points on two logarithmic axes, which to draw: the first of each cell of CELL decades a side. 9,400 marks of
    one GPU's products and attention are 1.3 MB of page, half of them under others."""
    cells: dict[tuple[int, int], int] = {}
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        cells.setdefault((round(log10(x) / CELL), round(log10(y) / CELL)), index)
    return sorted(cells.values())


def legend_mark(marker: str, colour: str, label: str, *, is_hollow: bool = False, **how: Any) -> Any:
    """A line of a legend that shows a mark by itself."""
    from matplotlib.lines import Line2D

    how = {"ms": 6, "mec": colour, "mfc": "none" if is_hollow else colour, **how}
    return Line2D([], [], ls="", marker=marker, label=label, **how)


def legend_below(ax: Axes, handles: Sequence[Any], drop: float) -> None:
    """A legend in four columns under the axes, `drop` of their height below them."""
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -drop), ncols=4, columnspacing=1.4,
              handletextpad=0.2, labelspacing=0.4)  # fmt: skip


def halo() -> list[Any]:
    """Ground around letters, so that words on lines and points stay legible."""
    import matplotlib as mpl
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground=mpl.rcParams["axes.facecolor"])]


def spread_apart(wanted: Sequence[float], step: float) -> list[float]:
    """Heights at least `step` apart, in the same order, as near to the ones wanted (ascending) as blocks allow."""
    blocks: list[list[float]] = []  # each: wanted heights of labels that touch, centred on their mean
    for height in wanted:
        blocks.append([height])
        while len(blocks) > 1 and _lowest(blocks[-1], step) < _lowest(blocks[-2], step) + step * len(blocks[-2]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [_lowest(block, step) + step * i for block in blocks for i in range(len(block))]


def _lowest(block: Sequence[float], step: float) -> float:
    return sum(block) / len(block) - step * (len(block) - 1) / 2


def new_sheet(height: float, rows: int = 1, **how: Any) -> Sheet:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
    axes = canvas.subplots(rows, 1, squeeze=False, **how)
    return Sheet(canvas, list(axes[:, 0]))


def finish(sheet: Sheet, name: str, title: str, caption: str, alt: str, basis: str) -> Figure:
    svg, png = io.StringIO(), io.BytesIO()
    if sheet.late:  # labels that lie along lines or beside them: once the layout is known
        sheet.canvas.draw_without_rendering()
        for place in sheet.late:
            place()
    sheet.canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    sheet.canvas.savefig(png, format="png", dpi=160, metadata={"Software": None})
    own = inline(svg.getvalue(), name, alt, sheet.tips, list(DARK_COLOURS), sheet.columns)
    return Figure(name, title, caption, alt, basis, own, png.getvalue())


def styled(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    """Draws within this file's style (that of the keyword `theme`), whatever the reader's matplotlibrc says."""

    def within(*args: Any, **kwargs: Any) -> Figure | None:
        import matplotlib as mpl

        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(kwargs.get("theme", LIGHT).style)
            return draw(*args, **kwargs)

    return within


def plain_log(ax: Axes, which: str, subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """10, 20, 50 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=list(subs)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
