"""The simulated allocator does what torch's does by its source; `tests/studies/memory` holds it to real requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.roofline.step.memory.allocator import (
    MIB,
    CachingAllocator,
    DeviceIsFull,
    RecordingAllocator,
    least_capacity,
    replay,
    rounded,
)

# What is asked for: bytes, or the place among the blocks held of the one that is given back.
Asked = list[int | float]
ASKED = st.lists(st.one_of(st.integers(1, 60 * MIB), st.floats(0, 1, exclude_max=True)), min_size=1, max_size=60)


def ask(allocator: CachingAllocator, asked: Asked) -> int:
    """Returns the sum of what was asked for and is held at the end."""
    held = []
    for each in asked:
        if isinstance(each, int):
            held.append((each, allocator.take(each)))
        elif held:
            allocator.give_back(held.pop(int(each * len(held)))[1])
    return sum(rounded(size) for size, _ in held)


@pytest.mark.parametrize(
    ("size", "counts_as", "taken"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (20 * MIB + MIB // 2, 20 * MIB + MIB // 2, 22 * MIB),  # 1.5 MiB are left, and split off
        (21 * MIB, 22 * MIB, 22 * MIB),  # 1 MiB is left, and is not
    ],
)
def test_what_a_first_request_takes(size: int, counts_as: int, taken: int) -> None:
    allocator = CachingAllocator()
    allocator.take(size)
    assert (allocator.allocated, allocator.reserved) == (counts_as, taken)


def test_the_smallest_block_that_holds_it_is_taken_and_neighbours_join() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(size * MIB) for size in (40, 30, 30, 30)]
    for block in (blocks[0], blocks[2]):
        allocator.give_back(block)
    assert allocator.take(28 * MIB + 1) is not None
    assert allocator.reserved == 130 * MIB
    allocator.take(39 * MIB)
    assert allocator.reserved == 130 * MIB  # of the larger one
    allocator = CachingAllocator()
    parts = [allocator.take(5 * MIB) for _ in range(4)]  # one segment
    for part in parts:
        allocator.give_back(part)
    allocator.take(20 * MIB)
    assert allocator.reserved == 20 * MIB
    other = allocator.take(20 * MIB, stream=1)
    allocator.give_back(other)
    allocator.take(20 * MIB)  # streams share no blocks
    assert allocator.reserved == 60 * MIB


def test_a_full_device_takes_idle_segments_back() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.give_back(allocator.take(40 * MIB))
    allocator.take(60 * MIB)
    assert allocator.reserved == 60 * MIB
    with pytest.raises(DeviceIsFull):
        allocator.take(10 * MIB)
    assert CachingAllocator().take(0) is None


@given(ASKED)
def test_nothing_is_lost(asked: Asked) -> None:
    allocator = CachingAllocator()
    held = ask(allocator, asked)
    assert held <= allocator.allocated <= allocator.most_allocated <= allocator.reserved
    assert allocator.allocated <= held + MIB * len(asked)


@given(ASKED)
def test_the_least_suffices_and_lies_between_allocated_and_reserved(asked: Asked) -> None:
    allocator = RecordingAllocator()
    ask(allocator, asked)
    least = least_capacity(allocator.requests, allocator.most_allocated, allocator.reserved)
    assert allocator.most_allocated <= least <= allocator.reserved
    small = CachingAllocator(least)
    replay(allocator.requests, small)
    assert small.reserved <= least
