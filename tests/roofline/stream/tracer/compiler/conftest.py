"""A process that compiles for an H200, one for all files: starting one takes ten seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode
from flopcast.roofline.stream.tracer.compiler.side_by_side import compilers


@pytest.fixture(scope="session")
def compiled() -> Iterator[Callable[[Asked], Future[OutputCode]]]:
    """Has steps compiled one after the other."""
    with compilers({"capability": [9, 0], "sm_count": 132}, 91900, 1) as compiled:
        yield compiled
