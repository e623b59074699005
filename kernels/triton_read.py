# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernel that reads a working set again and again within one launch. Imports triton: inside functions only.

A copy of a few megabytes takes little longer than the shortest kernel, so its bytes per second measure the launch. Here
a launch reads hundreds of megabytes, whatever the working set: the rate is that of the cache level that holds it. Loads
go past the L1 (`.cg`), which would serve small sets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # floats of one load: four vectors of 16 bytes per thread


@triton.jit
def read_kernel(x_ptr, out_ptr, blocks, rounds, programs, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    block = pid % blocks
    for _ in range(rounds):
        total += tl.load(x_ptr + block.to(tl.int64) * BLOCK + offsets, cache_modifier=".cg")
        block = (block + programs) % blocks
    tl.store(out_ptr + pid, tl.sum(total, axis=0))


def interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when this module was imported: the kernel then runs on CPU tensors."""
    return not isinstance(read_kernel, triton.JITFunction)


def launch(x: Tensor, out: Tensor, rounds: int) -> None:
    """Each of `len(out)` programs adds up `rounds` blocks of x, whose length is a multiple of BLOCK, in turns."""
    with torch.cuda.device_of(x):
        read_kernel[(len(out),)](x, out, len(x) // BLOCK, rounds, len(out), BLOCK=BLOCK, num_warps=WARPS)
