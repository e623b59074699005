# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Matrix product of fp8 operands by tensor-memory copies (sm_90 on): persistent, scaled at its end. Import it lazily.

C[m, n] = (A[m, k] B[n, k]^T) scale_a scale_b, both operands with k contiguous, as Hopper's fp8 products want them.
Hopper adds them up in 14 bits: without FAST, the BLOCK_K products of a step are added to a sum in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flopcast.kernels.launching import launch as launch_kernel
from flopcast.kernels.sizes import cdiv
from flopcast.kernels.triton_matmul_tma import tile_position


@triton.jit(do_not_specialize=["M", "N", "K", "group_m"])
def matmul_fp8_kernel(
    a_desc, b_desc, c_desc, scale_a_ptr, scale_b_ptr, M, N, K, group_m,
    ROW_SCALES: tl.constexpr, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """scale_a, scale_b: fp32 [1], or with ROW_SCALES [M] and [N]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_tiles = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = tile_position(tile, tiles_m, tiles_n, group_m)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(k_tiles):
            a = a_desc.load([row, k * BLOCK_K])
            b = b_desc.load([column, k * BLOCK_K])
            c = tl.dot(a, b.T, c, max_num_imprecise_acc=None if FAST else BLOCK_K)
        if ROW_SCALES:
            rows = row + tl.arange(0, BLOCK_M)
            columns = column + tl.arange(0, BLOCK_N)
            c *= tl.load(scale_a_ptr + rows, mask=rows < M, other=0.0)[:, None]
            c *= tl.load(scale_b_ptr + columns, mask=columns < N, other=0.0)[None, :]
        else:
            c *= tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
        c_desc.store([row, column], c.to(c_desc.dtype))


def interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when this module was imported: the kernels then run on CPU tensors."""
    return not isinstance(matmul_fp8_kernel, triton.JITFunction)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def launch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, programs: int, config: Any) -> None:
    """Writes out [m, n], with an `fp8_matmul.Fp8Config`."""
    (m, k), n = a.shape, b.shape[0]
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    with torch.cuda.device_of(a):
        launch_kernel(
            matmul_fp8_kernel, (min(programs, tiles),),
            _descriptor(a, config.block_m, config.block_k), _descriptor(b, config.block_n, config.block_k),
            _descriptor(out, config.block_m, config.block_n), scale_a, scale_b, m, n, k, config.group_m,
            ROW_SCALES=scale_a.numel() > 1 or scale_b.numel() > 1, FAST=config.fast,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
