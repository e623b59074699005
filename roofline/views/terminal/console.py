"""What the terminal shows, results on stdout and remarks on stderr. ms, TFLOP/s, TB/s and $/Mtoken are for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Whole(Console):
    """Lines wider than the terminal are left to it to break: cut short, a number reads as another."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})


def console() -> Console:
    """stdout, as wide as the terminal; 120 columns where there is none, so that nothing is cut in a log."""
    return Whole(width=None if sys.stdout.isatty() else 120, highlight=False)


def say(text: str) -> None:
    """A line for the person, on stderr: stdout is for results."""
    print(text, file=sys.stderr)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """First column left, the others right."""
    made = Table(title=title, caption=caption, title_justify="left", caption_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))  # a path may hold what rich takes for markup
    return made
