"""How a row-wise kernel holds a row in registers. No torch: what forecasts such kernels asks, too."""

from __future__ import annotations


def blocks_of(n: int) -> tuple[int, int]:
    """The powers of two (block, rest) in which a row of n elements is held: one block and no rest (0), or, where at
    most three quarters of a block of at least 2048 would be filled, half of it and the rest."""
    block = 1 << max(0, n - 1).bit_length()
    if n > block * 3 // 4 or block < 2048:
        return block, 0
    return block // 2, 1 << max(0, n - block // 2 - 1).bit_length()
