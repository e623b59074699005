"""Reads a folder of measurements: measurements.jsonl, one row per line, and machine.json. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flopcast import files
from flopcast.decode import load, parse_json, show
from flopcast.errors import DataError
from flopcast.microbench.records.machine import Machine
from flopcast.microbench.records.rows import SCHEMA, Row, checked, identity

MEASUREMENTS = "measurements.jsonl"
MACHINE = "machine.json"

_SHOWN = 3  # wrong rows that a warning tells of
_LONGEST = 8 * 1024**2  # bytes of a row; the longest that is committed has 480,000
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

    An incomplete last line (of a killed run) is left out, and so is a row that is wrong; `warnings` say which and why.
    Raises DataError, with the line number, on a file without a right row (a foreign file), or of a newer schema.
    """
    rows: list[Row] = []
    wrong: list[str] = []
    start, torn_at = 0, None
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(_parse_line(line, path, number))
            except ValueError as error:
                # what follows the final newline is empty unless it is torn; a lone line is torn if it began as ours
                is_last, is_ours = number == len(lines), bool(rows) or line.startswith(_OPENING[: len(line)])
                if is_last and is_ours and not _is_json(line):
                    torn_at = start
                    told = (
                        f"{path}, line {number}: the last line is torn ({len(line)} bytes), as a killed run"
                        " leaves it; ignored, it will be measured again"
                    )
                else:
                    wrong.append(f"line {number}: {error}")
        start += len(line) + 1
    if wrong and not rows:
        raise DataError(f"{path}, {wrong[0]} (is it a measurement file? `flopcast bench --out DIR` writes them)")
    warnings = [] if torn_at is None else [told]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        warnings.append(
            f"{path}: {len(wrong)} of {len(rows) + len(wrong)} rows are wrong and left out: "
            f"{'; '.join(wrong[:_SHOWN])}{more}"
        )
    return Measurements(rows, warnings, torn_at)


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def _parse_line(line: bytes, path: Path, number: int) -> Row:
    """The row of a line. Raises ValueError where it is wrong, DataError where a newer flopcast wrote it."""
    if len(line) > _LONGEST:
        raise ValueError(f"it has {len(line):,} bytes: valid are {_LONGEST:,}")
    found = parse_json(line)
    schema = found.get("schema") if isinstance(found, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise DataError(
            f"{path}, line {number}: schema {show(schema)} is newer than this flopcast reads ({SCHEMA}):"
            " upgrade flopcast"
        )
    return checked(found)


def file_in(folder: Path) -> Path:
    """The measurement file of a folder: the plain one that rows are appended to, or else the gzipped one."""
    plain, packed = folder / MEASUREMENTS, folder / f"{MEASUREMENTS}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def read(path: Path | str) -> Measurements:
    """The measurements of a file, or of a folder that holds one, gzipped or not. An empty file has no rows.

    Raises DataError as `parse` does, and when the path does not exist.
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
    if path.parent.is_file():
        raise DataError(f"{folder} is a file: give the folder that `flopcast bench` wrote its measurements to")
    return load(Machine, path, "a machine description", hint=f"`flopcast bench --out {folder}` makes it", schema=SCHEMA)
