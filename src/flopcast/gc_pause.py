"""Pauses Python's cyclic garbage collector where objects form no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection within the context.

    Streams and profiles are many objects without cycles: collections took a quarter of a sweep's time, and a tenth of
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
    """Makes collections within the context skip the objects that existed before, so that they scan only new ones."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
