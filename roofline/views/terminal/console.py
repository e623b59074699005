"""What the terminal shows: results on stdout, remarks on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class UncutConsole(Console):
    """Leaves lines wider than the terminal to the terminal: cut short, a number reads as another."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})


def console() -> Console:
    """stdout, as wide as the terminal; 120 columns where there is none, so that nothing is cut in a log."""
    return UncutConsole(width=None if sys.stdout.isatty() else 120, highlight=False)


def say(text: str) -> None:
    """A line for the person, on stderr: stdout is for results."""
    print(text, file=sys.stderr)


def warn(warnings: Iterable[str]) -> None:
    """What a result does not know well, a line each on stderr."""
    for warning in warnings:
        say(f"warning: {warning}")


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None, *, ruled: bool = True
) -> Table:
    """First column left, the others right. Without rules between columns seven columns of intervals fit."""
    made = Table(title=title, caption=caption, title_justify="left", caption_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))  # a path may hold what rich takes for markup
    if not ruled:
        made.box, made.padding, made.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
        for made_column, cells in zip(made.columns, zip(*rows, strict=True), strict=False):
            # narrow terminals break cells at blanks, never inside a number: cut short, (41-84) would read (41-8
            made_column.min_width = max(
                len(word) for cell in (made_column.header, *cells) for word in str(cell).split() or [""]
            )
    return made


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None, *, ruled: bool = True
) -> None:
    """Prints a `table`."""
    console().print(table(title, columns, rows, caption, ruled=ruled))
