# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Device code that several fused kernels share. Imports triton: import this module inside functions only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch
from flopcast.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def column_sum_kernel(partial_ptr, out_ptr, count, n, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """out[n] = the sum of partial[count, n] (fp32) over its rows, in one fixed order."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < n
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for start in range(0, count, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < count)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + rows[:, None] * n + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=inside)


def interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when triton was imported: the kernels then run on CPU tensors."""
    return not isinstance(column_sum_kernel, triton.JITFunction)


def column_sums(partial: Tensor, out: Tensor) -> None:
    """out[n] = partial[count, n].sum(0), deterministic: the second stage of a weight's gradient."""
    count, n = partial.shape
    # Many programs, and all loads of each at once: 64 rows at a time a sum over 660 took ten latencies of 1 us.
    block, rows = 16, min(1024, max(64, next_power_of_2(count)))
    with torch.cuda.device_of(partial):
        launch(
            column_sum_kernel,
            (cdiv(n, block),),
            partial,
            out,
            count,
            n,
            BLOCK_P=rows,
            BLOCK_C=block,
            num_warps=16 if rows > 256 else 8,
        )
