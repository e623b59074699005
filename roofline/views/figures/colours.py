"""Defines the figures' colours and styles, on light and dark background, and the colours and marks of classes and
backends.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Each has a lighter variant for a dark
background, which the page's SVG takes by itself (CSS variables) and a file takes on request (`theme=DARK`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, INK, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#d8c51c", "#22262b", "#8a9099",
)  # fmt: skip
CARD = "#fcfcfb"
EDGE, GRID, BROWN = "#5b626b", "#dfe2e6", "#6b4e00"
# Each colour's variant on dark background; `report.css` gives the page the same ones.
DARK_COLOURS = {
    BLUE: "#58aee8", ORANGE: "#efb13d", GREEN: "#2fc295", RED: "#f08a4b", PURPLE: "#dd9cbf", SKY: "#8fd0f5",
    YELLOW: "#e8da5a", INK: "#e6e8eb", GREY: "#98a0aa", CARD: "#1d2126", EDGE: "#9aa3ad", GRID: "#343a42",
    BROWN: "#d0b36a",
}  # fmt: skip


@dataclass(frozen=True)
class Theme:
    """A background, and the variants of the light background's colours on it."""

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
