"""Reads a folder of measurements: measurements.jsonl, one row per line, and machine.json. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopcast import files
from flopcast.decode import Wrong, left_out, load, show
from flopcast.errors import DataError
from flopcast.gc_pause import no_garbage_collection
from flopcast.json_files import parse_lines
from flopcast.microbench.records.machine import Machine
from flopcast.microbench.records.rows import SCHEMA, Row, decoded, identity

MEASUREMENTS = "measurements.jsonl"
MACHINE = "machine.json"

_OPENING = b'{"schema":'  # how every line begins: distinguishes a torn first line from a foreign file


@dataclass(frozen=True)
class Measurements:
    """The content of a measurement file. `torn_at`: the byte offset where a torn last line begins, else None."""

    rows: list[Row]
    warnings: list[str] = field(default_factory=list)
    torn_at: int | None = None

    def latest(self) -> list[Row]:
        """One row per identity, the last one written: a retry replaces a row of status "oom". The tiny models of
        another run of steps (`session`) are no retry: a process is one draw of the host."""
        return list({(identity(row), _process(row)): row for row in self.rows}.values())


def _process(row: Row) -> str | None:
    return row.get("session") if row["key"].startswith("host/") else None


def parse(data: bytes, path: Path) -> Measurements:
    """Parses the bytes of a measurement file into rows.

    An incomplete last line (of a killed run) is left out, and so is a row that is wrong; `warnings` say which and why.
    Raises DataError, with the line number, on a file without a right row (a foreign file), or of a newer schema.
    """
    lines = data.split(b"\n")
    parsed, wrong = parse_lines(lines)
    for number, value in parsed.items():
        _check_schema(value, path, number)
    rows: list[Row] = []
    for number, row in zip(parsed, decoded(list(parsed.values())), strict=True):
        if isinstance(row, Wrong):
            wrong[number] = str(row)
        else:
            rows.append(row)
    torn_at, warnings = None, []
    # what follows the final newline is empty unless it is torn; a lone line is torn if it began as ours
    last = lines[-1]
    if len(lines) in wrong.keys() - parsed.keys() and (rows or last.startswith(_OPENING[: len(last)])):
        del wrong[len(lines)]
        torn_at = len(data) - len(last)
        warnings.append(
            f"{path}, line {len(lines)}: the last line is torn ({len(last)} bytes), as a killed run"
            " leaves it; ignored, it will be measured again"
        )
    if wrong and not rows:
        raise DataError(
            f"{path}, line {min(wrong)}: {wrong[min(wrong)]} (is it a measurement file? `flopcast bench --out DIR`"
            " writes them)"
        )
    if wrong:
        warnings.append(f"{path}: {left_out(wrong, len(rows))}")
    return Measurements(rows, warnings, torn_at)


def _check_schema(value: Any, path: Path, number: int) -> None:
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise DataError(
            f"{path}, line {number}: schema {show(schema)} is newer than this flopcast reads ({SCHEMA}):"
            " upgrade flopcast"
        )


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
    with no_garbage_collection():  # a third of the time of reading ten folders
        return parse(data, path)


def read_machine(folder: Path | str) -> Machine:
    """The machine.json of a folder. Raises DataError when missing, malformed or of a newer schema."""
    path = Path(folder) / MACHINE
    if path.parent.is_file():
        raise DataError(f"{folder} is a file: give the folder that `flopcast bench` wrote its measurements to")
    return load(Machine, path, "a machine description", hint=f"`flopcast bench --out {folder}` makes it", schema=SCHEMA)
