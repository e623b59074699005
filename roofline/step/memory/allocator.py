"""Deals out memory as torch's caching allocator does (c10/cuda/CUDACachingAllocator.cpp of torch 2.11).

Memory comes from the device in segments: of 2 MiB for blocks of up to 1 MiB, of 20 MiB for those below 10 MiB, else of
the block's size rounded up to 2 MiB. A request takes the smallest free block of its CUDA stream that holds it, and what
is left of that becomes a free block, but not where 1 MiB or less of a large one is left: that is handed out too, and
counts as allocated. A block that is given back joins its free neighbours. Driven by the requests that 20 real steps
made, this is torch's peak to the byte, but for the order in which the driver deals out addresses (0.03% at most).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

ROUNDED_TO = 512  # bytes: every block is a multiple of them
MIB = 1024**2
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_LARGE_FROM, _COMMON_SEGMENT, _LARGE_STEP = 10 * MIB, 20 * MIB, 2 * MIB
_LEAST_LEFT_OF_LARGE = MIB  # what is left of a large block is split off where it is more
LEAST_KNOWN_TO = 0.01  # of what is allocated


def rounded(size: int) -> int:
    """The bytes that a request of `size` takes at least."""
    return -(-size // ROUNDED_TO) * ROUNDED_TO


class Block:
    """A part of a segment. `bytes` is what it counts as while it is handed out."""

    __slots__ = ("address", "after", "before", "bytes", "is_free", "pool")

    def __init__(self, address: int, bytes_: int, pool: _Pool, before: Block | None, after: Block | None) -> None:
        self.address, self.bytes, self.pool, self.before, self.after = address, bytes_, pool, before, after
        self.is_free = True

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None

    def join_after(self) -> None:
        """Takes in the block behind it."""
        assert self.after is not None
        self.bytes += self.after.bytes
        self.after = self.after.after
        if self.after is not None:
            self.after.before = self


_Free = tuple[int, int, Block]  # bytes, address: in the order in which a block is looked for


class _Pool:
    """The free blocks of one CUDA stream that are small, or that are large."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[_Free] = []

    def add(self, block: Block) -> None:
        block.is_free = True
        insort(self.free, (block.bytes, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.bytes, block.address))]


class DeviceIsFull(Exception):
    """The device has no memory left for a segment."""


class CachingAllocator:
    """torch's allocator on a device of `capacity` bytes, or of as many as it asks for. `allocated`, the most that it
    was, and `reserved`, what is taken of the device, are bytes as torch counts them."""

    def __init__(self, capacity: int | None = None) -> None:
        self.allocated = self.most_allocated = self.reserved = 0
        self._capacity = capacity
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def take(self, size: int, stream: int = 0) -> Block | None:
        """Hands out a block for `size` bytes; None for none, as torch does. Raises DeviceIsFull."""
        if size <= 0:
            return None
        size = rounded(size)
        is_small = size <= _SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small)
        free = pool.free
        place = bisect_left(free, (size,))  # the smallest free block that holds it
        block = free.pop(place)[2] if place < len(free) else self._segment(size, pool)
        left = block.bytes - size
        if left >= ROUNDED_TO if is_small else left > _LEAST_LEFT_OF_LARGE:
            rest = Block(block.address + size, left, pool, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.bytes = rest, size
            pool.add(rest)
        block.is_free = False
        self.allocated += block.bytes
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        return block

    def give_back(self, block: Block | None) -> None:
        """Takes back what `take` handed out."""
        if block is None:
            return
        self.allocated -= block.bytes
        pool, before, after = block.pool, block.before, block.after
        if after is not None and after.is_free:
            pool.remove(after)
            block.join_after()
        if before is not None and before.is_free:
            pool.remove(before)
            before.join_after()
            block = before
        pool.add(block)

    def _segment(self, size: int, pool: _Pool) -> Block:
        if pool.is_small:
            bytes_ = _SMALL_SEGMENT
        else:
            bytes_ = _COMMON_SEGMENT if size < _LARGE_FROM else -(-size // _LARGE_STEP) * _LARGE_STEP
        if not self._has_room(bytes_):  # once the driver refuses, what lies idle goes back to it
            self._give_back_segments()
            if not self._has_room(bytes_):
                raise DeviceIsFull
        address = self._next_address
        self._next_address += bytes_
        self.reserved += bytes_
        return Block(address, bytes_, pool, None, None)

    def _has_room(self, bytes_: int) -> bool:
        return self._capacity is None or self.reserved + bytes_ <= self._capacity

    def _give_back_segments(self) -> None:
        for pool in self._pools.values():
            self.reserved -= sum(block.bytes for _, _, block in pool.free if block.is_segment)
            pool.free = [free for free in pool.free if not free[2].is_segment]


# What is asked of an allocator, in order: bytes, or -n for the n-th block ever asked for, which is given back; each
# with its CUDA stream.
Requests = Sequence[tuple[int, int]]


class RecordingAllocator(CachingAllocator):
    """An allocator that keeps what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, int]] = []
        self._numbers: dict[Block | None, int] = {}
        self._asked = 0

    def take(self, size: int, stream: int = 0) -> Block | None:
        block = super().take(size, stream)
        self._asked += 1
        self._numbers[block] = self._asked
        self.requests.append((size, stream))
        return block

    def give_back(self, block: Block | None) -> None:
        self.requests.append((-self._numbers[block], 0))
        super().give_back(block)


def replay(requests: Requests, allocator: CachingAllocator) -> None:
    """Asks an allocator for what another was asked for. Raises DeviceIsFull."""
    blocks: list[Block | None] = []
    for asked, stream in requests:
        if asked >= 0:
            blocks.append(allocator.take(asked, stream))
        else:
            allocator.give_back(blocks[-asked - 1])


def least_capacity(requests: Requests, allocated: int, reserved: int) -> int:
    """Returns the bytes of a device with which torch's allocator meets all requests, to a hundredth, between what is
    allocated and what it takes where there is plenty."""
    too_few, enough = allocated - 1, reserved
    while enough - too_few > max(LEAST_KNOWN_TO * allocated, 1):
        tried = (too_few + enough) // 2
        try:
            replay(requests, CachingAllocator(tried))
            enough = tried
        except DeviceIsFull:
            too_few = tried
    return enough
