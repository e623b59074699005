"""The record of a tuning: one JSON line for each check and each time, which outlives a kill."""

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
    """Ends a last line cut short by a kill, so that the next one stands by itself."""
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")


def rows(path: Path) -> list[Row]:
    """All whole lines; a last one cut short by a kill is left out."""
    found = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found
