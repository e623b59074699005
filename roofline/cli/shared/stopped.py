"""What Ctrl-C leaves of a command that measures: rows are written as they are finished, so all of them are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def resumable(folder: Path, rows: str = "") -> Iterator[None]:
    """Notes on a KeyboardInterrupt raised within how many rows are kept in the folder's files of that name (of
    measurements, unless it is given)."""
    from flopcast.microbench.records.records import MEASUREMENTS

    rows = rows or MEASUREMENTS
    try:
        yield
    except KeyboardInterrupt as stop:
        kept = sum(path.read_bytes().count(b"\n") for path in folder.rglob(rows))
        if kept:
            stop.add_note(f"{kept} finished measurements are kept in {folder}: the same command continues there")
        else:
            stop.add_note("no measurement had been finished")
        raise


def told(left: BaseException) -> str:
    """What a command that ended by Ctrl-C has to say: `left` is the exit, raised from the interrupt."""
    notes: list[str] = []
    fault: BaseException | None = left
    while fault is not None:
        notes += getattr(fault, "__notes__", [])
        fault = fault.__cause__ or fault.__context__
    return "; ".join(["stopped", *notes])
