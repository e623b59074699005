"""Every field of the rows in the repository is one that its kind of row declares, and of the type that it declares."""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from flopcast.microbench.records import machine, records, rows

REPORTS = Path(__file__).resolve().parents[3] / "reports"
# One of each: a whole bench, real steps with their kernels and estimates, the host with Triton's operators.
FOLDERS = sorted({path.parent for path in REPORTS.glob("**/measurements.jsonl*") if path.stat().st_size < 400_000})


def is_of(value: Any, hint: Any) -> bool:
    """Whether a value that JSON gives has the type that a field declares."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is float:
        return hint is Any or isinstance(value, float | int)
    if origin is Required:
        return is_of(value, arguments[0])
    if origin in (Union, types.UnionType):
        return any(is_of(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is Sequence or origin is list:
        return isinstance(value, list) and all(is_of(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_of(each, arguments[1]) for each in value.values())
    if is_typeddict(hint):
        return untold(value, hint) == {}
    return isinstance(value, hint)


def untold(record: Any, kind: type) -> dict[str, Any]:
    """The fields that a record has and its type has not, or not so."""
    hints = get_type_hints(kind)
    return {name: value for name, value in record.items() if name not in hints or not is_of(value, hints[name])}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(REPORTS)))
def test_the_rows_of_a_folder_are_as_declared(folder: Path) -> None:
    found = records.read(folder).rows
    assert [(row["key"], odd) for row in found if (odd := untold(row, rows.kind_of(row)))] == []
    assert untold(records.read_machine(folder), machine.Machine) == {}
