"""Reads text and CSV files that users give, whole and with the line number of every row, and writes CSV files.

Uses neither torch nor pandas.

A quote that is opened and never closed would turn all lines below it into one cell and lose rows silently. No table
read here has multi-line cells, so a cell that runs over the end of its line is refused; the error names the line on
which the cell begins.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from flopcast import files
from flopcast.errors import DataError, UsageError

SHOWN = 10  # columns named in a message
_QUOTED = frozenset("'=+-@\t\r")
_RUNS = re.compile(r"'*[=+\-@\t\r]")  # how cells begin that a spreadsheet runs, or that stand for such a one
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Sheet(NamedTuple):
    """A table as it stands in its file: the header and its line number, and the line number and cells of each row."""

    header_line: int
    columns: list[str]
    rows: list[tuple[int, list[str]]]


def read_text(path: Path, give: str = "give a CSV file with a header") -> str:
    """Returns the text of a UTF-8 file, plain or gzipped, without a byte order mark. `give` ends the error message.

    Raises DataError if the file cannot be read or is in another encoding, with the line number.
    """
    try:
        data = files.read(path)
    except FileNotFoundError:
        raise DataError(f"{path} cannot be read: it does not exist; {give}") from None
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {getattr(fault, 'strerror', None) or fault}; {give}") from None
    if data.startswith(_UTF16) or b"\0" in data[:4]:
        raise DataError(f"{path} is in UTF-16 or UTF-32: save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        raise DataError(
            f"{path} line {line}: byte 0x{data[fault.start]:02x} is not UTF-8: save the file as UTF-8; {give}"
        ) from None


def parse_csv(path: Path, text: str, *, comments: bool = False) -> Sheet:
    """Parses `text`, the contents of `path`, as a table. Blanks around cells are stripped and empty lines are skipped;
    `comments` also skips lines that begin with #. Rows may have more or fewer cells than there are columns.

    Raises DataError, with the line number, if there is no header, no row below it, a column named twice, a quote that
    is not closed on its line, or text after a closing quote.
    """
    if text.lstrip()[:1] in ("{", "["):
        raise DataError(f"{path} is JSON: give a CSV file with a header")
    lines = [
        (line, cells)
        for line, cells in _lines(path, text)
        if cells not in ([], [""]) and not (comments and cells[0].startswith("#"))
    ]
    if not lines:
        raise DataError(f"{path} is empty; give a CSV file with a header")
    (first, columns), *rows = lines
    twice = sorted(name for name, count in Counter(columns).items() if count > 1)[:SHOWN]
    if twice:
        raise DataError(f"{path} line {first}: columns {', '.join(map(repr, twice))} are named twice; name each once")
    if len(columns) == 1 and ";" in columns[0]:
        raise DataError(f"{path} line {first}: cells are separated by semicolons; separate them by commas")
    if not rows:
        raise DataError(f"{path} holds a header and no rows; give one row at least")
    return Sheet(first, columns, rows)


def read_csv(path: Path) -> Sheet:
    """Reads a CSV file, plain or gzipped, with `parse_csv`. Raises DataError as `read_text` and `parse_csv` do."""
    return parse_csv(path, read_text(path))


def as_row(columns: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    """Maps columns to cells: a short row lacks its last columns, and cells beyond the last column are dropped."""
    return dict(zip_longest(columns, cells[: len(columns)], fillvalue=""))


def named(columns: Sequence[str]) -> str:
    """Column names as a message lists them; only the first few if there are many."""
    more = f" and {len(columns) - SHOWN} more" if len(columns) > SHOWN else ""
    return ", ".join(columns[:SHOWN]) + more


def check_writable(path: Path | None, option: str = "--out", *, is_folder: bool = False) -> None:
    """Raises UsageError if `path` cannot become a file (or a folder), before time is spent on computing its contents.
    Creates nothing."""
    if path is None:
        return
    if path.is_dir() and not is_folder:
        raise UsageError(f"{option} {str(path)!r} is a folder: give a file in it")
    if path.exists() and is_folder and not path.is_dir():
        raise UsageError(f"{option} {str(path)!r} is a file: give a folder")
    above = path if path.exists() else next(folder for folder in path.absolute().parents if folder.exists())
    if (above != path and not above.is_dir()) or not os.access(above, os.W_OK):
        why = "may not be written to" if above.is_dir() else "is no folder"
        raise UsageError(f"{option} {str(path)!r} cannot be written, {above} {why}: choose another")


def _lines(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields each line that is not empty as its number and its cells."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as fault:
            if reader.line_num == line and "end of data" not in str(fault):
                raise DataError(
                    f"{path} line {line}: not CSV ({fault}); inside a quoted cell write a quote twice"
                ) from None
            raise _unclosed(path, line, reader.line_num) from None
        if cells is None:
            return
        if reader.line_num > line:
            raise _unclosed(path, line, reader.line_num)
        yield line, [_plain(cell.strip()) for cell in cells]


def _unclosed(path: Path, line: int, end: int) -> DataError:
    over = f" (read as one cell down to line {end})" if end > line else ""
    return DataError(
        f"{path} line {line}: a quote is opened and not closed on that line{over}; close it, or leave it out"
    )


Row = dict[str, str]
EXTRA = "\0extra"  # cells of a row beyond the header's columns; no column can have this name


def read_rows(path: Path) -> tuple[list[str], list[Row]]:
    """Returns (columns, rows) of a CSV file, plain or gzipped; blanks around cells are stripped.

    Cells beyond the header's columns are kept under EXTRA: such a row may be shifted, so it gets no answer.

    Raises DataError as `read_csv` does.
    """
    _, columns, lines = read_csv(path)
    rows = []
    for _, cells in lines:
        row = as_row(columns, cells)
        if any(cells[len(columns) :]):
            row[EXTRA] = ", ".join(cells[len(columns) :])
        rows.append(row)
    return columns, rows


def check_columns(path: Path, columns: Sequence[str], valid: Sequence[str]) -> None:
    """Raises UsageError for a column that is not valid: a misspelt one would silently take its default."""
    unknown = [name for name in columns if name not in valid]
    if unknown:
        raise UsageError(f"{path}: unknown columns {named(unknown)}; valid are {', '.join(valid)}")


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a CSV file: booleans as true and false, floats to 7 digits, None as an empty cell.

    Raises UsageError if the file cannot be written, RunError without room.
    """
    with files.write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([format_cell(name) for name in columns])
            writer.writerows([format_cell(row.get(name)) for name in columns] for row in rows)


def format_cell(value: Any) -> str:
    """Formats a value as `parse_cell` reads it; NaN and infinities become an empty cell. A text that a spreadsheet
    would run as a formula gets a ' in front (OWASP, "CSV injection"), which `parse_csv` takes away again."""
    if type(value) is str:  # the common case: cells copied from an input table
        return f"'{value}" if value[:1] in _QUOTED and _RUNS.match(value) and not _is_number(value) else value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.7g}" if isfinite(value) else ""
    return "" if value is None else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plain(cell: str) -> str:
    """A cell without the ' that `format_cell` put in front."""
    return cell[1:] if cell[:1] == "'" and _RUNS.match(cell) else cell


def parse_cell(name: str, text: str, kind: type) -> Any:
    """Parses a cell as `kind`. 8.0 counts as an integer, since pandas writes integer columns with gaps so.

    Raises UsageError if `text` is not of `kind`.
    """
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{name} is {text!r}: valid are true and false")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return float(text) if kind is float else int(text.removesuffix(".0"))
        except ValueError:
            what = "a number" if kind is float else "an integer"
            raise UsageError(f"{name} is {text!r}: valid is {what}") from None
    return text


def check_length(row: Row) -> None:
    if EXTRA in row:
        raise UsageError(f"the row has cells beyond the last column: {row[EXTRA]}; quote a cell with commas in it")
