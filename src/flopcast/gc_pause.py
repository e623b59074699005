"""Python's cyclic garbage collector, kept from looking through what holds no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Within it nothing is collected.

    Streams and profiles are many objects and no cycles: collections took a quarter of a sweep's time, and a tenth of
    importing torch and transformers. One within a measurement takes 10-100 ms with transformers loaded, and may free
    CUDA objects during a capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def older_kept() -> Iterator[None]:
    """Within it, collections leave out the objects that were there before, and cost what is new."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
