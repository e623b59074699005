"""The search for the largest batch of steps that have to be compiled: few batches, and the same answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.questions.largest_batch import MOST, _largest, _largest_of_few

PROFILE = find_profile("nvidia-h200")
ROOM = PROFILE.device["memory_bytes"]
FIXED = ROOM // 3


@pytest.mark.parametrize(
    ("needed", "tries"),
    [
        (lambda batch: FIXED + batch * ROOM // 90, 4),  # a line: the two at its end are the last
        (lambda batch: FIXED + batch * ROOM // 9, 4),
        (lambda batch: FIXED + batch * ROOM // 90 + max(0, batch - 20) * ROOM // 300, 12),  # from 20 on steeper
        (lambda batch: FIXED + round(batch**1.1 * ROOM / 5000), 20),  # far off, and bent
        (lambda batch: FIXED + batch * ROOM * 2 // 5, 3),  # one
        (lambda batch: ROOM + batch, 3),  # none
    ],
)
def test_few_batches_are_tried(needed: Callable[[int], int], tries: int) -> None:
    tried: list[int] = []
    prepared: list[int] = []

    def counted(batch: int) -> int:
        tried.append(batch)
        return needed(batch)

    assert _largest_of_few(counted, PROFILE, 256, prepared.extend) == _largest(needed, PROFILE, 256)
    assert tried == prepared
    assert len(set(tried)) == len(tried) <= tries


def test_no_limit_is_told() -> None:
    with pytest.raises(UsageError, match="more than 8 sequences of 256 tokens fit"):
        _largest_of_few(lambda batch: FIXED + batch * (ROOM // MOST // 4), PROFILE, 256)
