"""Reads JSON as the standard has it, within bounds: a file of 1.5 MB may hold what fills the memory."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from gzip import BadGzipFile
from pathlib import Path
from typing import Any, NoReturn

from flopcast import files
from flopcast.errors import DataError

MOST_BYTES = 64 * 1024**2  # of a document; the largest that ships has 10 MB
MOST_CONTAINERS = 2_000_000  # objects and lists of a document, 64 bytes of memory and more each
LONGEST_LINE = 8 * 1024**2  # bytes of a row; the longest that is committed has 480,000


def read_json(path: Path, noun: str, *, hint: str) -> Any:
    """What a JSON file holds, plain or gzipped. `noun` ("a host") names what the file should be, `hint` says how to
    come by one. Raises DataError where the file is missing, torn, too large, or no JSON."""
    try:
        return parse_json(files.read(path, MOST_BYTES))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: {hint}") from None
    except (BadGzipFile, ValueError) as error:
        raise DataError(f"{path} is not {noun}: {error}; {hint}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; {hint}") from None


def parse_json(data: bytes | str) -> Any:
    """JSON as the standard has it: no NaN, no infinities, UTF-8. Raises ValueError, also for what is nested too deeply
    or has so many objects and lists that it would fill the memory."""
    try:
        text = data if isinstance(data, str) else data.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    if text.count("[") + text.count("{") > MOST_CONTAINERS:
        raise ValueError(f"it has more than {MOST_CONTAINERS:,} objects and lists")
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def parse_lines(lines: Sequence[bytes]) -> tuple[dict[int, Any], dict[int, str]]:
    """(the value of each line, why a line is none), by number from 1; blank lines are left out."""
    found: dict[int, Any] = {}
    wrong: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"it has {len(line):,} bytes: valid are {LONGEST_LINE:,}")
                found[number] = parse_json(line)
            except ValueError as error:
                wrong[number] = str(error)
    return found, wrong


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON: a number is finite")


_JSON = json.JSONDecoder(parse_constant=_no_number)
