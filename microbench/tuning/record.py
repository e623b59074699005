"""Reads and writes the record of a tuning: one JSON line per check and per timing, which survives a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDS = "matmul_tuning.jsonl"

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def mend(path: Path) -> None:
    """Terminates a last line that a kill cut short, so that the next row starts on a line of its own."""
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")


def rows(path: Path) -> list[Row]:
    """Returns the rows of all complete lines; a last line cut short by a kill is left out."""
    found = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found
