"""Defines the tables of the report page. A cell shows a number in the unit of its column and keeps the SI value, which
sorting and the CSV download use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from flopcast.roofline.dollars.points import Ranged

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
    is_hidden: bool = False  # in the CSV alone
    group: str = ""  # a heading over neighbouring columns
    below: Callable[[Any], str] | None = None  # row -> small text under the value
    link_to: Callable[[Any], str | None] | None = None  # row -> where the cell leads

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

    def small(self, row: Any) -> str:
        return "" if self.below is None else self.below(row)

    def link(self, row: Any) -> str | None:
        return None if self.link_to is None else self.link_to(row)

    @property
    def head_style(self) -> str:
        """CSS classes of the heading."""
        styles = (("number", self.is_number), ("detail", self.is_detail), ("hidden", self.is_hidden))
        return " ".join(name for name, is_set in styles if is_set)

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

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings over columns with the number of shown columns below each; none where no column has one."""
        shown = [column.group for column in self.columns if not column.is_hidden]
        return [(group, len(list(members))) for group, members in groupby(shown)] if any(shown) else []


def ranged(
    key: str, label: str, show: Callable[[float], str], of: Callable[[Any], Ranged | None], *, group: str = ""
) -> list[Column]:
    """A column of values with the ends of their interval below, and hidden columns of the two ends."""

    def value(row: Any) -> float | None:
        return None if (found := of(row)) is None else found.value

    def ends(row: Any) -> str:
        return "" if (found := of(row)) is None else f"{show(found.low)}–{show(found.high)}"

    def end(name: str) -> Callable[[Any], float | None]:
        return lambda row: None if (found := of(row)) is None else float(getattr(found, name))

    return [
        Column(key, label, show, value, below=ends, group=group),
        *(Column(f"{key}_{name}", f"{label}, {name}", of=end(name), is_hidden=True) for name in ("low", "high")),
    ]


def text(key: str, label: str, of: Callable[[Any], Any] | None = None) -> Column:
    return Column(key, label, of=of, is_number=False)


def prose(key: str, label: str, of: Callable[[Any], Any] | None = None) -> Column:
    return Column(key, label, of=of, is_number=False, is_prose=True)
