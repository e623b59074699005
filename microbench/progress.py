"""Progress on stderr: a bar with the time left on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

QUIET_SECONDS = 2.0  # nothing is shown for what is over sooner
LINE_SECONDS = 5.0

Advance = Callable[[str], None]  # called once a unit, with what was just done


@contextmanager
def progress(total: int, label: str, *, stream: TextIO | None = None) -> Iterator[Advance]:
    """Yields a function to call after each of `total` units."""
    stream = stream or sys.stderr
    if stream.isatty():
        yield from _bar(total, label, stream)
    else:
        yield from _lines(total, label, stream)


def _bar(total: int, label: str, stream: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("[dim]{task.fields[unit]}"),
    )  # fmt: skip
    bar = Progress(*columns, console=Console(file=stream), transient=True)
    task = bar.add_task(label, total=total, unit="")
    start, shown = time.monotonic(), False

    def advance(unit: str) -> None:
        nonlocal shown
        bar.advance(task)
        bar.update(task, unit=unit[:60])
        if not shown and time.monotonic() - start > QUIET_SECONDS:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            bar.stop()


def _lines(total: int, label: str, stream: TextIO) -> Iterator[Advance]:
    start = last = time.monotonic()
    done = 0

    def advance(unit: str) -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - start > QUIET_SECONDS and now - last > LINE_SECONDS:
            left = (now - start) / done * (total - done)
            print(f"{label}: {done}/{total}, about {left:.0f} s left", file=stream, flush=True)
            last = now

    yield advance
