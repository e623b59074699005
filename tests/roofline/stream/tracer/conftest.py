"""Keeps what traces leave behind out of the collector's way: torch built without CUDA ended the process of later tests
when a full collection met some of it (2.13: seen in a run of real steps after these files, in one process)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def left_uncollected() -> Iterator[None]:
    yield
    gc.freeze()
