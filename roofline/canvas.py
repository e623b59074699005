"""What the report's figures are drawn on: style, colours, number words, and the way from matplotlib into a page.

A figure is drawn once and kept twice, as an SVG that goes into the page (hovering a point shows its values) and as
a PNG file. Light card background in every theme; colours are Okabe and Ito's, told apart by colour-blind readers.
The same data give the same bytes: no dates, no random ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Row = Mapping[str, Any]

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, INK, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#d8c51c", "#22262b", "#8a9099",
)  # fmt: skip
CARD = "#fcfcfb"
WIDTH = 7.4  # inches; with 10-point type, legible on a phone too once scrolled
STYLE: Any = {  # matplotlib types its keys one by one
    "figure.facecolor": CARD, "axes.facecolor": CARD, "savefig.facecolor": CARD, "text.color": INK,
    "axes.edgecolor": "#5b626b", "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "font.size": 10.0, "axes.titlesize": 10.0,
    "legend.fontsize": 8.8, "legend.frameon": False, "axes.grid": True, "grid.color": "#dfe2e6",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "svg.hashsalt": "flopcast", "svg.fonttype": "path",
    "path.simplify": False,
}  # fmt: skip
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


@dataclass
class Sheet:
    """A canvas being drawn, and the hover texts of its point clouds by SVG id."""

    canvas: Canvas
    axes: list[Axes]
    tips: dict[str, list[str]] = field(default_factory=dict)

    def scatter(
        self, ax: Axes, xs: Sequence[float], ys: Sequence[float], tips: Sequence[str], **how: Any
    ) -> Any:
        points = ax.scatter(xs, ys, **how)
        name = f"tips{len(self.tips)}"
        points.set_gid(name)
        self.tips[name] = list(tips)
        return points


def new_sheet(height: float, rows: int = 1, **how: Any) -> Sheet:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
    axes = canvas.subplots(rows, 1, squeeze=False, **how)
    return Sheet(canvas, list(axes[:, 0]))


def finish(sheet: Sheet, name: str, title: str, caption: str, alt: str, basis: str) -> Figure:
    svg, png = io.StringIO(), io.BytesIO()
    sheet.canvas.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    sheet.canvas.savefig(png, format="png", dpi=160, metadata={"Software": None})
    return Figure(
        name, title, caption, alt, basis, _inline(svg.getvalue(), name, alt, sheet.tips), png.getvalue()
    )


def _inline(svg: str, name: str, alt: str, tips: Mapping[str, Sequence[str]]) -> str:
    """An SVG for the inside of a page: no prologue, ids of its own, an accessible name, hover texts on points."""
    from xml.etree import ElementTree as ET

    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata"):
                parent.remove(child)
    for element in list(root.iter()):
        texts = tips.get(element.get("id", ""))
        if not texts:
            continue
        # one mark a point; many alike are <use> of one <path>, few are paths of their own
        marks = [e for e in element.iter() if e.tag.endswith("}use")]
        marks = marks or [e for e in element.iter() if e.tag.endswith("}path")]
        if len(marks) == len(texts):
            for mark, text in zip(marks, texts, strict=True):
                ET.SubElement(mark, "{http://www.w3.org/2000/svg}title").text = text
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            value = re.sub(r"url\(#", f"url(#{name}-", value)
            key = key.rpartition("}")[2]
            if key == "id":
                value = f"{name}-{value}"
            elif key == "href" and value.startswith("#"):
                value = f"#{name}-{value[1:]}"
            element.set(key, value)
    for key in ("version", "height"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": alt, "width": "100%"}
    return ET.tostring(root, encoding="unicode")


def styled(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    """Draws within this file's style, whatever the reader's matplotlibrc says."""

    def within(*args: Any, **kwargs: Any) -> Figure | None:
        import matplotlib as mpl

        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(STYLE)
            return draw(*args, **kwargs)

    return within


def plain_log(ax: Axes, which: str, subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """10, 20, 50 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=list(subs)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


# --- words and numbers


def count(n: float) -> str:
    """613182976 -> 613M"""
    return f"{n / 1e9:.3g}B" if n >= 0.9995e9 else f"{n / 1e6:.3g}M" if n >= 0.9995e6 else f"{n / 1e3:.3g}k"


def scale(most: float, unit: str) -> tuple[float, str]:
    """(1e12, "TFLOP/s") or, for a processor, (1e9, "GFLOP/s")."""
    return (1e12, f"T{unit}") if most >= 1e12 else (1e9, f"G{unit}")


def rate(value: float, unit: str) -> str:
    """7.9e14, "FLOP/s" -> 790 TFLOP/s"""
    by, name = scale(value, unit)
    shown = value / by
    return f"{shown:,.0f} {name}" if shown >= 100 else f"{shown:.3g} {name}"


def byte_size(n: float) -> str:
    """1e6 -> 1 MB"""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if n >= 10**power:
            return f"{n / 10**power:.3g} {unit}"
    return f"{n:.3g} B"


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
