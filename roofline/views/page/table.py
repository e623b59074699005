"""Defines the tables of the report page. A cell shows a number in the unit of its column and keeps the SI value, which
sorting and the CSV download use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NONE = "–"


@dataclass(frozen=True)
class Column:
    """A column. `key`: heading in the CSV and, without `of`, the attribute (the key of a mapping) that is shown.
    `of`: row -> value. `show`: value -> text; None is shown as a dash."""

    key: str
    label: str
    show: Callable[[Any], str] = str
    of: Callable[[Any], Any] | None = None
    is_number: bool = True
    is_error: bool = False
    is_prose: bool = False  # text that wraps
    is_detail: bool = False  # shown on the screen and in the CSV, not on paper

    def value(self, row: Any) -> Any:
        if self.of is not None:
            return self.of(row)
        return row[self.key] if isinstance(row, Mapping) else getattr(row, self.key)

    def text(self, row: Any) -> str:
        value = self.value(row)
        return NONE if value is None else self.show(value)

    def raw(self, row: Any) -> str:
        """The cell for sorting and CSV: a number in SI units, empty where there is none."""
        value = self.value(row)
        if isinstance(value, bool):
            return str(value).lower()
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    @property
    def head_style(self) -> str:
        """CSS classes of the heading."""
        return " ".join(name for name, is_set in (("number", self.is_number), ("detail", self.is_detail)) if is_set)

    def style(self, row: Any) -> str:
        """CSS classes of a cell: errors of more than 5, 10 and 25% are tinted."""
        extra = "prose" if self.is_prose else ""
        if self.is_error and (value := self.value(row)) is not None:
            extra = f"error{sum(abs(value) > limit for limit in (0.05, 0.10, 0.25))}"
        return f"{self.head_style} {extra}".strip()


@dataclass(frozen=True)
class Table:
    """A table. `name`: its anchor and its CSV file; `note`: what its numbers are based on; `rows`: all of one type."""

    name: str
    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[Any]

    @property
    def is_tall(self) -> bool:
        """Whether the table scrolls in a window of its own: rows of prose take several lines each."""
        return len(self.rows) > (10 if any(column.is_prose for column in self.columns) else 40)


def text(key: str, label: str, of: Callable[[Any], Any] | None = None) -> Column:
    return Column(key, label, of=of, is_number=False)


def prose(key: str, label: str, of: Callable[[Any], Any] | None = None) -> Column:
    return Column(key, label, of=of, is_number=False, is_prose=True)
