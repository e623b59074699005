"""Which tiles each program of attention's backward in one pass takes. No torch.

A tile is 128 keys of one (batch, key-value head) pair. Under a causal mask early keys see most queries: a tile's work
falls with its block. Programs run at the same time on what should fit L2: queries, the gradient of the output and the
sums of dQ, which each of a pair's tiles reads or adds to. So pairs go in sections, as even ones as fit: of sections of
five, five, five and one pair the last left most programs idle (16 pairs of 6,144 tokens: 0.89 of cuDNN's speed on an
H200, 1.05 in four of four).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from flopcast.kernels.sizes import cdiv

KEYS = 128  # of a tile
FIXED_WORK = 1.0  # what a tile takes besides its blocks of 128 queries, in such blocks


def even_section(pairs: int, seq: int, head_dim: int, l2_bytes: int) -> int:
    """How many of the pairs to process at a time, in sections as even as can be. Of each pair a row of one query head
    is in use: query and gradient in 16 bits, sums in 32. `l2_bytes`: how much of L2 to count on; 0: no sections."""
    most = min(pairs, max(1, l2_bytes // (seq * 8 * head_dim))) if l2_bytes else pairs
    return cdiv(pairs, cdiv(pairs, most))


@lru_cache(maxsize=4096)
def deal_tiles(pairs: int, blocks: int, causal: bool, section: int, programs: int) -> Sequence[Sequence[int]]:
    """The tiles of each program, pair * blocks + block: section by section, in each the longest first, every tile to
    the program that is free first."""
    free = [(0.0, program) for program in range(programs)]
    taken: list[list[int]] = [[] for _ in range(programs)]
    for first in range(0, pairs, section):
        for block in range(blocks):
            for pair in range(first, min(first + section, pairs)):
                when, program = free[0]
                taken[program].append(pair * blocks + block)
                heapq.heapreplace(free, (when + FIXED_WORK + (blocks - block if causal else blocks), program))
    return tuple(map(tuple, taken))
