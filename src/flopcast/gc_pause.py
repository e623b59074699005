"""Python's cyclic garbage collector, kept from looking through what holds no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Streams and profiles are many objects and no cycles: looking for some took a quarter of a sweep's time, and a
    tenth of importing torch and transformers."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def older_kept() -> Iterator[None]:
    """What stands now is not looked through: a collection then costs what is new."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
