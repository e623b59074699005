"""Shows progress on stderr.

On a terminal it is a bar with the time left, or a count of seconds where the total is unknown; elsewhere a line every
few seconds, if asked for. Rich is imported only when a bar is drawn, so cached forecasts do not load it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar

QUIET_SECONDS = 1.0  # nothing is shown for work that ends sooner
LINE_SECONDS = 5.0


@contextmanager
def progress(
    label: str, total: int | None = None, *, in_logs: bool = False, stream: TextIO | None = None
) -> Iterator[Progress]:
    """Yields the object to which finished units are reported: `advance()` after each, or `update(done, total)`.

    `in_logs`: print lines where `stream`, by default stderr, is not a terminal. Without it nothing is shown there.
    """
    stream = stream or sys.stderr
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    shown = (_Bar if is_terminal else _Lines if in_logs else Progress)(label, total, stream)
    try:
        yield shown
    finally:
        shown.close()


class Progress:
    """Counts the units done, of a total. This class shows nothing."""

    def __init__(self, label: str, total: int | None, stream: TextIO) -> None:
        self.label, self.total, self.stream = label, total, stream
        self.done = 0
        self.begun = monotonic()

    def advance(self, unit: str = "") -> None:
        """Counts one more unit as done, named `unit`."""
        self.done += 1
        self._show(unit)

    def update(self, done: int, total: int) -> None:
        """Sets the number of units done and the total."""
        self.done, self.total = done, total
        self._show("")

    def _show(self, unit: str) -> None:
        seconds = monotonic() - self.begun
        if seconds > QUIET_SECONDS:
            self.draw(unit, seconds)

    def draw(self, unit: str, seconds: float) -> None:
        """Shows the progress, `seconds` after the beginning; `unit` is the one done last."""

    def close(self) -> None:
        """Removes what is shown."""


class _Lines(Progress):
    last = 0.0  # seconds after the beginning

    def draw(self, unit: str, seconds: float) -> None:
        if seconds - self.last <= LINE_SECONDS or self.total is None:
            return
        left = seconds / self.done * (self.total - self.done)
        print(f"{self.label}: {self.done}/{self.total}, about {left:.0f} s left", file=self.stream, flush=True)
        self.last = seconds


class _Bar(Progress):
    """Draws a bar; as long as there is no total, a thread writes "label ... 3 s" instead."""

    def __init__(self, label: str, total: int | None, stream: TextIO) -> None:
        super().__init__(label, total, stream)
        self._bar: RichBar | None = None
        self._counted = Event()
        self._counter: Thread | None = None
        if total is None:
            self._counter = Thread(target=self._count, daemon=True)
            self._counter.start()

    def _count(self) -> None:
        seconds = QUIET_SECONDS
        while not self._counted.wait(seconds):
            print(f"\r{self.label} ... {monotonic() - self.begun:.0f} s", end="", file=self.stream, flush=True)
            seconds = 1.0

    def _stop_counting(self) -> None:
        if self._counter is None:
            return
        self._counted.set()
        self._counter.join()
        self._counter = None
        if monotonic() - self.begun >= QUIET_SECONDS:
            print("\r\x1b[K", end="", file=self.stream, flush=True)

    def draw(self, unit: str, seconds: float) -> None:
        if self.total is None:
            return
        if self._bar is None:
            self._stop_counting()
            self._bar = _rich_bar(self.stream)
            self._bar.add_task(self.label, total=self.total, unit="")
        self._bar.update(self._bar.task_ids[0], completed=self.done, total=self.total, unit=unit[:60])
        self._bar.start()  # only the first call has an effect

    def close(self) -> None:
        self._stop_counting()
        if self._bar is not None:
            self._bar.stop()


def _rich_bar(stream: TextIO) -> RichBar:
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
    return Progress(*columns, console=Console(file=stream), transient=True)
