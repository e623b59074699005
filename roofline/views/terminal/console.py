"""Writes to the terminal: results to stdout, remarks to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flopcast.errors import visible


class UncutConsole(Console):
    """A console that does not cut lines wider than the terminal: a number cut short reads as another."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})


def console() -> Console:
    """A console on stdout, as wide as the terminal; 120 columns without a terminal, so that nothing is cut in a log."""
    return UncutConsole(width=None if sys.stdout.isatty() else 120, highlight=False)


def say(text: str) -> None:
    """Prints a remark on stderr, since stdout is for results. What a file may have put into it is made visible, not
    obeyed: a terminal takes control characters for commands."""
    print(visible(text), file=sys.stderr)


def warn(warnings: Iterable[str]) -> None:
    """Prints the warnings of a result on stderr, one per line."""
    for warning in warnings:
        say(f"warning: {warning}")


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None, *, ruled: bool = True
) -> Table:
    """Makes a table, first column left, the others right; without column rules, seven columns of intervals fit."""
    made = Table(title=title, caption=caption, title_justify="left", caption_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*(escape(visible(cell)) for cell in row))  # a name may hold what rich reads as markup
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
