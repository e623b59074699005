"""Brings the C library's memory allocator to the state of a process that has run for a while.

glibc maps blocks above a threshold afresh, and gives free memory at its heap's end above twice that threshold back to
the system, so that touching what is taken again is a page fault for every 4 KiB. The threshold starts at 128 KiB and
rises to the size of the largest block that was freed, 32 MiB at most. Steps of tiny models take 9 ms in a process that
has freed such a block and 12 ms in one that has not (2-core x86, glibc 2.36): kernels, the host's cost and real steps
can be compared only in the same state. A process that trains has soon freed one.
"""

from __future__ import annotations

import torch

LARGEST = 31 * 2**20  # bytes, just below the highest threshold


def settle_allocator(device: torch.device) -> None:
    """Call before measuring on a processor; on other devices, and other C libraries, it changes nothing."""
    if device.type == "cpu":
        torch.empty(LARGEST, dtype=torch.uint8)  # freed at once
