"""A line on the terminal while something takes its time. The standard library alone: cached forecasts load no rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

SOON = 1.0  # seconds: what is done by then needs no word


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """After a second "label ... 3 s" on stderr, counting, gone at the end; nothing where that is no terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    done, begun = Event(), monotonic()

    def count() -> None:
        if done.wait(SOON):
            return
        while True:
            print(f"\r{label} ... {monotonic() - begun:.0f} s", end="", file=sys.stderr, flush=True)
            if done.wait(1.0):
                break
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    counting = Thread(target=count, daemon=True)
    counting.start()
    try:
        yield
    finally:
        done.set()
        counting.join()
