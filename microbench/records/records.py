"""Reads a folder of measurements: measurements.jsonl, one row per line, and machine.json. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from flopcast import files
from flopcast.errors import DataError
from flopcast.microbench.records.machine import Machine
from flopcast.microbench.records.rows import SCHEMA, STATUSES, Row, identity

MEASUREMENTS = "measurements.jsonl"
MACHINE = "machine.json"

_REQUIRED = ("key", "status", "machine", "method")
_OPENING = b'{"schema":'  # how every line begins: distinguishes a torn first line from a foreign file


@dataclass(frozen=True)
class Measurements:
    """The content of a measurement file. `torn_at`: the byte offset where a torn last line begins, else None."""

    rows: list[Row]
    warnings: list[str] = field(default_factory=list)
    torn_at: int | None = None

    def latest(self) -> list[Row]:
        """One row per identity, the last one written: a retry replaces a row of status "oom"."""
        return list({identity(row): row for row in self.rows}.values())


def parse(data: bytes, path: Path) -> Measurements:
    """Parses the bytes of a measurement file into rows.

    An incomplete last line (of a killed run) is left out and reported in `warnings`. Raises DataError,
    with the line number, on any other malformed line, a foreign file, or a newer schema.
    """
    rows: list[Row] = []
    start = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)  # what follows the final newline: empty unless torn
        if line.strip():
            try:
                row = _parse_line(line, number, path, rows)
            except DataError:
                ours = bool(rows) or line.startswith(_OPENING[: len(line)])
                if last and ours and not _is_json(line):
                    warning = (
                        f"{path}, line {number}: the last line is torn ({len(line)} bytes), as a killed run"
                        " leaves it; ignored, it will be measured again"
                    )
                    return Measurements(rows, [warning], torn_at=start)
                raise
            rows.append(row)
        start += len(line) + 1
    return Measurements(rows)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse_line(line: bytes, number: int, path: Path, rows_before: list[Row]) -> Row:
    foreign = "" if rows_before else " (is it a measurement file? `flopcast bench --out DIR` writes them)"
    try:
        row: Row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not JSON: {error}{foreign}") from None
    if not isinstance(row, dict) or not isinstance(row.get("schema"), int):
        raise DataError(
            f"{path}, line {number}: not a measurement: an object with a `schema` number is expected{foreign}"
        )
    if row["schema"] > SCHEMA:
        raise DataError(
            f"{path}, line {number}: schema {row['schema']} is newer than this flopcast reads ({SCHEMA}):"
            " upgrade flopcast"
        )
    missing = [name for name in _REQUIRED if name not in row]
    if missing:
        raise DataError(f"{path}, line {number}: not a measurement: {', '.join(missing)} missing{foreign}")
    if row["status"] not in STATUSES:
        raise DataError(f"{path}, line {number}: unknown status {row['status']!r}: known are {', '.join(STATUSES)}")
    return row


def file_in(folder: Path) -> Path:
    """The measurement file of a folder: the plain one that rows are appended to, or else the gzipped one."""
    plain, packed = folder / MEASUREMENTS, folder / f"{MEASUREMENTS}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def read(path: Path | str) -> Measurements:
    """The measurements of a file, or of a folder that holds one, gzipped or not. An empty file has no rows.

    Raises DataError as `parse` does, and when the path does not exist or is not UTF-8 text.
    """
    path = Path(path)
    if path.is_dir():
        path = file_in(path)
    try:
        data = files.read(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: `flopcast bench --out {path.parent}` makes it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    return parse(data, path)


def read_machine(folder: Path | str) -> Machine:
    """The machine.json of a folder. Raises DataError when missing, malformed or of a newer schema."""
    path = Path(folder) / MACHINE
    try:
        machine: Machine = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: `flopcast bench --out {folder}` makes it") from None
    except NotADirectoryError:
        raise DataError(
            f"{folder} is a file: give the folder that `flopcast bench` wrote its measurements to"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a machine description: {error}") from None
    if not isinstance(machine, dict) or not isinstance(machine.get("schema"), int) or "machine" not in machine:
        raise DataError(f"{path} is not a machine description: `schema` and `machine` are expected")
    if machine["schema"] > SCHEMA:
        raise DataError(
            f"{path}: schema {machine['schema']} is newer than this flopcast reads ({SCHEMA}): upgrade flopcast"
        )
    return machine
