"""The allocator's state, by the page faults of a child process that makes and frees blocks."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CHILD = """
import resource, sys, torch
from flopcast.microbench.timing.allocator import settle_allocator
if sys.argv[1] == "settled":
    settle_allocator(torch.device("cpu"))
def run():
    for _ in range(20):
        kept = [torch.ones(500_000) for _ in range(8)]
        del kept
run()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(state: str) -> int:
    """Page faults while eight blocks of 2 MB are made and freed, 20 times."""
    done = subprocess.run([sys.executable, "-c", CHILD, state], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator")
def test_blocks_are_taken_from_memory_that_the_process_has() -> None:
    assert 10 * faults("settled") < faults("fresh")
