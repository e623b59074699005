"""The allocator's state, by what glibc says of a child process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# mallinfo2's fourth field: blocks that were mapped afresh, which the kernel has to clear page by page
CHILD = """
import ctypes, torch
from flopcast.microbench.timing.allocator import settle_allocator
class Info(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
settle_allocator(torch.device("cpu"))
before = mallinfo().field3
blocks = [torch.ones(1_000_000) for _ in range(4)]
print(mallinfo().field3 - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator")
def test_large_blocks_come_from_memory_that_the_process_has() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0
