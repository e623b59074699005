"""Reads and writes the record of a tuning: one JSON line per check and per timing, which survives a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from flopcast import files
from flopcast.bounds import Seconds, Valid
from flopcast.decode import Wrong, by_field, decode_each, left_out
from flopcast.errors import DataError
from flopcast.json_files import parse_lines
from flopcast.kernels.matmul_configs import from_key
from flopcast.kernels.shapes import Layout, Size

RECORDS = "matmul_tuning.jsonl"

Row = dict[str, Any]


class Check(TypedDict):
    """A kernel compiled and checked; beside these fields why it is of no use, and what the compiler says of it."""

    kind: Literal["check"]
    kernel: str
    layout: Layout
    status: Literal["ok", "wrong", "dropped", "error"]


def _is_config(key: str) -> bool:
    return key == "cublas" or bool(from_key(key))


class Timing(TypedDict):
    """A configuration at a shape: `round` 0 its product, 1 a few readings in turn with all others' and cuBLAS's
    (`library_seconds`), 2 more of the fastest's and of cuBLAS's."""

    kind: Literal["time"]
    layout: Layout
    m: Size
    n: Size
    k: Size
    config: Annotated[str, Valid(_is_config, "a configuration")]
    round: Literal[0, 1, 2]
    status: Literal["ok", "wrong", "error"]
    seconds: NotRequired[Seconds]
    library_seconds: NotRequired[Seconds]


def _is_timed(row: Timing) -> bool:
    return row["status"] != "ok" or "seconds" in row


class Failed(TypedDict):
    """A shape whose tuning failed as a whole."""

    kind: Literal["shape"]
    key: str


_KINDS: dict[str, Any] = {
    "check": Check,
    "time": Annotated[Timing, Valid(_is_timed, "a timing with its seconds")],
    "shape": Failed,
}


_ANY: Any = Annotated[Row, by_field("kind", _KINDS)]


def append(path: Path, row: Row) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def mend(path: Path) -> None:
    """Terminates a last line that a kill cut short, so that the next row starts on a line of its own."""
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")


def rows(path: Path, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """The rows of all complete lines. A last line cut short by a kill is left out; of what else is left out because it
    is wrong, `say` is told. Raises DataError for a file that cannot be read."""
    if not path.is_file():
        return []
    try:
        lines = files.read(path).split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    parsed, wrong = parse_lines(lines)
    wrong.pop(len(lines), None)
    found: list[Row] = []
    for number, row in zip(parsed, decode_each(_ANY, list(parsed.values())), strict=True):
        if isinstance(row, Wrong):
            wrong[number] = str(row)
        else:
            found.append(row)
    if wrong:
        say(f"{path}: {left_out(wrong, len(found))}")
    return found
