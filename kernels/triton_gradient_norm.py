# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The norm of a list of gradients in one Triton launch over all of them, and one over its sums. Import it lazily.

`table` is int64 [tensors, 2]: the address of each gradient and its number of elements. Program i sums the squares of
chunk `chunk_index[i]` of tensor `chunk_tensor[i]`; the sums are added up in one fixed order: bit-identical runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch as launch_kernel
from flopcast.kernels.triton_adamw import _address

SUM_BLOCK = 4096


@triton.jit
def squares_kernel(
    table_ptr, chunk_tensor_ptr, chunk_index_ptr, partial_ptr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial[program] = the sum of the squares of its chunk."""
    row = table_ptr + tl.load(chunk_tensor_ptr + tl.program_id(0)) * 2
    start = tl.load(chunk_index_ptr + tl.program_id(0)).to(tl.int64) * CHUNK
    numel = tl.load(row + 1)
    gradient = _address(row, ALIGNED)
    within = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(0, CHUNK, BLOCK):
        begin = start + offset
        if begin + BLOCK <= numel:
            g = tl.load(gradient + begin + within)
            squares += g * g
        elif begin < numel:
            g = tl.load(gradient + begin + within, mask=begin + within < numel, other=0.0)
            squares += g * g
    tl.store(partial_ptr + tl.program_id(0), tl.sum(squares, 0))


@triton.jit
def root_of_sum_kernel(partial_ptr, norm_ptr, count, BLOCK: tl.constexpr):
    """norm[0] = sqrt(the sum of partial[count]), by one program."""
    within = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        total += tl.load(partial_ptr + start + within, mask=start + within < count, other=0.0)
    tl.store(norm_ptr, tl.sqrt(tl.sum(total, 0)))


def launch(table: Any, norm: Tensor) -> None:
    """Writes norm, fp32 [1], of a `flopcast.kernels.gradient_norm.Table`."""
    count = table.chunk_tensor.numel()
    partial = torch.empty(count, dtype=torch.float32, device=norm.device)
    with torch.cuda.device_of(norm):
        launch_kernel(
            squares_kernel, (count,),
            table.pointers, table.chunk_tensor, table.chunk_index, partial, ALIGNED=table.aligned,
            CHUNK=table.chunk, BLOCK=table.block, num_warps=8,
        )  # fmt: skip
        launch_kernel(root_of_sum_kernel, (1,), partial, norm, count, BLOCK=SUM_BLOCK, num_warps=8)
