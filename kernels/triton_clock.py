# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Reads, on each multiprocessor that gets a block, its cycles and the time (PTX ISA: %clock64, %globaltimer, %smid)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_clocks_kernel(out_ptr):
    """Writes three int64 numbers per block: the multiprocessor, its cycles, nanoseconds."""
    multiprocessor = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    at = out_ptr + 3 * tl.program_id(0)
    tl.store(at, multiprocessor.to(tl.int64))
    tl.store(at + 1, cycles)
    tl.store(at + 2, now)
