# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton matmul: one tiled kernel for every layout. Imports triton: import it inside functions only.

C[m, n] = A[m, k] B[k, n] with strides for all three, so that nt, nn and tn differ in strides alone. Each program makes
one tile of C; tiles are walked in groups of group_m rows, which keeps the operands in L2. Sizes that divide the tile
skip their masks (EVEN_*), and masks keep their alignment otherwise: loads stay vectorised when the size is a multiple
of 16. With SPLIT programs per tile, each sums a part of k into an fp32 workspace, and a second kernel adds the parts in
a fixed order.

Runs on any part; `triton_matmul_tma` is the one for sm_90 where the operands allow it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch as launch_kernel
from flopcast.kernels.sizes import cdiv
from flopcast.kernels.triton_matmul_tma import AHEAD, add_parts, after_the_kernel_before, tile_position


@triton.jit(do_not_specialize=["group_m"])
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, partial_ptr,
    M, N, K, group_m,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, SPLIT). partial_ptr: fp32 [tiles, SPLIT, BLOCK_M, BLOCK_N], for SPLIT > 1."""
    after_the_kernel_before(PDL)
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_position(tile, tiles_m, tiles_n, group_m)

    # Tile origins in 64 bits: 16384 tokens x 151,936 logits are past 2^31 elements. Offsets in a tile fit 32.
    start_m = pid_m.to(tl.int64) * BLOCK_M
    start_n = pid_n.to(tl.int64) * BLOCK_N
    in_m = tl.arange(0, BLOCK_M)
    in_n = tl.arange(0, BLOCK_N)
    in_k = tl.arange(0, BLOCK_K)
    mask_m = (pid_m * BLOCK_M + in_m) < M
    mask_n = (pid_n * BLOCK_N + in_n) < N
    a_tile = a_ptr + start_m * stride_am + (in_m[:, None] * stride_am + in_k[None, :] * stride_ak)
    b_tile = b_ptr + start_n * stride_bn + (in_k[:, None] * stride_bk + in_n[None, :] * stride_bn)

    k_first = 0
    k_last = tl.cdiv(K, BLOCK_K)
    if SPLIT > 1:
        part = tl.program_id(1)
        k_tiles = k_last
        k_first = part * k_tiles // SPLIT
        k_last = (part + 1) * k_tiles // SPLIT
        start_k = (k_first * BLOCK_K).to(tl.int64)
        a_tile += start_k * stride_ak
        b_tile += start_k * stride_bk
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(k_first, k_last):
        mask_k = in_k < K - k * BLOCK_K
        if EVEN_K and EVEN_M:
            a = tl.load(a_tile)
        elif EVEN_K:
            a = tl.load(a_tile, mask=mask_m[:, None], other=0.0)
        elif EVEN_M:
            a = tl.load(a_tile, mask=mask_k[None, :], other=0.0)
        else:
            a = tl.load(a_tile, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(b_tile)
        elif EVEN_K:
            b = tl.load(b_tile, mask=mask_n[None, :], other=0.0)
        elif EVEN_N:
            b = tl.load(b_tile, mask=mask_k[:, None], other=0.0)
        else:
            b = tl.load(b_tile, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_tile += BLOCK_K * stride_ak
        b_tile += BLOCK_K * stride_bk

    if SPLIT > 1:
        start = partial_ptr + (tile.to(tl.int64) * SPLIT + tl.program_id(1)) * (BLOCK_M * BLOCK_N)
        tl.store(start + in_m[:, None] * BLOCK_N + in_n[None, :], accumulator)
    else:
        c_tile = c_ptr + start_m * stride_cm + start_n * stride_cn
        c_tile += in_m[:, None] * stride_cm + in_n[None, :] * stride_cn
        c = accumulator.to(c_ptr.dtype.element_ty)
        if EVEN_M and EVEN_N:
            tl.store(c_tile, c)
        else:
            tl.store(c_tile, c, mask=mask_m[:, None] & mask_n[None, :])


def interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when this module was imported: the kernels then run on CPU tensors."""
    return not isinstance(matmul_kernel, triton.JITFunction)


def launch(
    a_MK: Tensor, b_KN: Tensor, config: Any, tf32: bool = False, out: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """c[m, n] of a[m, k] and b[k, n], any strides, with a `matmul_configs.MatmulConfig` of kind "pointer".

    `pdl`: whether to launch ahead of the end of the kernel before, which sm_90 can.
    """
    m, k = a_MK.shape
    n = b_KN.shape[1]
    c = torch.empty((m, n), dtype=a_MK.dtype, device=a_MK.device) if out is None else out
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    split = min(config.split, cdiv(k, config.block_k))
    partial = c
    if split > 1:
        sizes = (tiles, split, config.block_m, config.block_n)
        partial = torch.empty(sizes, dtype=torch.float32, device=a_MK.device)
    with torch.cuda.device_of(a_MK):
        launch_kernel(
            matmul_kernel, (tiles, split),
            a_MK, b_KN, c, partial,
            m, n, k, config.group_m,
            a_MK.stride(0), a_MK.stride(1), b_KN.stride(0), b_KN.stride(1), c.stride(0), c.stride(1),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=split,
            EVEN_M=m % config.block_m == 0, EVEN_N=n % config.block_n == 0, EVEN_K=k % config.block_k == 0,
            PRECISION="tf32" if tf32 else "ieee", PDL=pdl,
            num_warps=config.num_warps, num_stages=config.num_stages, **(AHEAD if pdl else {}),
        )  # fmt: skip
        if split > 1:
            add_parts(partial, c, config, pdl)
    return c
