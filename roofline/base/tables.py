"""Tables as plain text and as HTML, for what Python callers print or see in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def as_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Lays out a table in plain text: the first column to the left, the others to the right; no line ends in blanks.

    Without `columns` the rows are pairs of a name and a text, both to the left."""
    shown = [tuple(columns), *rows] if columns and rows else list(rows)
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = []
    for row in shown:
        cells = [
            cell.ljust(width) if index == 0 or not columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([title, *lines, *notes])


def as_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Writes the same table in HTML, with every text escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f"<table><caption>{escape(title)}</caption>"
        f"{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>{below}"
    )
