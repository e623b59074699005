"""Locates the data that ship with the package, and reads its tables."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flopcast.errors import DataError

DATA = Path(__file__).resolve().parent.parent / "data"
_Parsed = TypeVar("_Parsed")


def parsed_rows(path: Path, parse: Callable[[dict[str, str]], _Parsed]) -> list[_Parsed]:
    """Parses each row of a CSV table, given by column. Raises DataError with the line of a row that `parse` refuses by
    KeyError, TypeError or ValueError."""
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                found.append(parse(row))
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{path.name} line {reader.line_num}: {error!r}") from error
    return found
