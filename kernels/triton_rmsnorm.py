# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""RMSNorm in Triton, forward and backward, with and without a residual. Imports triton: import lazily.

A program holds whole rows in registers: ROWS rows of BLOCK columns and REST further ones (0: none), powers of two that
hold n (`row_tiles.blocks_of`: 5,120 in 8,192 would leave three threads of eight idle). In the forward each program
takes one tile. The backward is persistent: each program walks over tiles, keeps its share of the weight's gradient in
registers, and leaves one row of partial sums; a second kernel adds these up in a fixed order. No atomics: bit-identical
runs. The forward is launched ahead of the end of the kernel before it (`triton_ahead`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch
from flopcast.kernels.sizes import cdiv
from flopcast.kernels.triton_ahead import launched_ahead
from flopcast.kernels.triton_common import column_sums


@triton.jit
def _load(ptr, row, stride, column, mask):
    return tl.load(ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _with_residual(x, residual, sum_ptr, row, n, column, mask):
    """x + residual, rounded as it is written to sum_ptr, which is what the backward will read."""
    rounded = (x + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row[:, None] * n + column[None, :], rounded, mask=mask)
    return rounded.to(tl.float32)


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, rows, n, stride_x, stride_residual, eps,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """WHOLE: n is BLOCK, every operand contiguous and the last tile full, so that nothing is masked."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    if WHOLE:
        n = BLOCK
        stride_x = BLOCK
        stride_residual = BLOCK
        exists = tl.full((ROWS,), True, tl.int1)
        inside = tl.full((BLOCK,), True, tl.int1)
        mask = tl.full((ROWS, BLOCK), True, tl.int1)
    else:
        exists = row < rows
        inside = column < n
        mask = exists[:, None] & inside[None, :]
    if AHEAD:
        # before any access: the kernel before may write x, or read where y lies
        tl.extra.cuda.gdc_wait()
    # before the reduction, whose barrier no load is moved across: one latency, not two
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if AHEAD:
        # after the wait. Here, not a line before: ptxas leaves the weight's load ahead of it, and so of the rows'
        tl.extra.cuda.gdc_launch_dependents()
    x = _load(x_ptr, row, stride_x, column, mask)
    if RESIDUAL:
        x = _with_residual(x, _load(residual_ptr, row, stride_residual, column, mask), sum_ptr, row, n, column, mask)
    squares = tl.sum(x * x, 1)
    if REST > 0:
        column2 = BLOCK + tl.arange(0, REST)
        mask2 = exists[:, None] & (column2 < n)[None, :]
        weight2 = tl.load(weight_ptr + column2, mask=column2 < n, other=0.0).to(tl.float32)
        x2 = _load(x_ptr, row, stride_x, column2, mask2)
        if RESIDUAL:
            residual = _load(residual_ptr, row, stride_residual, column2, mask2)
            x2 = _with_residual(x2, residual, sum_ptr, row, n, column2, mask2)
        squares += tl.sum(x2 * x2, 1)
    rstd = tl.rsqrt(squares / n + eps)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(y_ptr + row[:, None] * n + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    if REST > 0:
        y2 = x2 * rstd[:, None] * weight2[None, :]
        tl.store(y_ptr + row[:, None] * n + column2[None, :], y2.to(y_ptr.dtype.element_ty), mask=mask2)
    tl.store(rstd_ptr + row, rstd, mask=exists)


@triton.jit
def _store_gradient(
    dx, dsum_ptr, dx_ptr, dx2_ptr, row, n, stride_dsum, column, mask, DSUM: tl.constexpr, SECOND: tl.constexpr
):
    if DSUM:
        dx += _load(dsum_ptr, row, stride_dsum, column, mask)
    out = row[:, None] * n + column[None, :]
    tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if SECOND:
        tl.store(dx2_ptr + out, dx.to(dx2_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dx2_ptr, partial_ptr,
    rows, n, stride_dy, stride_dsum, stride_x,
    DSUM: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx = rstd (w dy - xhat mean(w dy xhat)) + dsum, xhat = x rstd; SECOND writes it in a second dtype too."""
    column = tl.arange(0, BLOCK)
    inside = column < n
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if REST > 0:
        column2 = BLOCK + tl.arange(0, REST)
        inside2 = column2 < n
        weight2 = tl.load(weight_ptr + column2, mask=inside2, other=0.0).to(tl.float32)
        dweight2 = tl.zeros((ROWS, REST), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        exists = row < rows
        mask = exists[:, None] & inside[None, :]
        rstd = tl.load(rstd_ptr + row, mask=exists, other=0.0)
        xhat = _load(x_ptr, row, stride_x, column, mask) * rstd[:, None]
        dy = _load(dy_ptr, row, stride_dy, column, mask)
        scaled = dy * weight[None, :]
        dweight += dy * xhat
        projected = tl.sum(scaled * xhat, 1)
        if REST > 0:
            mask2 = exists[:, None] & inside2[None, :]
            xhat2 = _load(x_ptr, row, stride_x, column2, mask2) * rstd[:, None]
            dy2 = _load(dy_ptr, row, stride_dy, column2, mask2)
            scaled2 = dy2 * weight2[None, :]
            dweight2 += dy2 * xhat2
            projected += tl.sum(scaled2 * xhat2, 1)
        mean = (projected / n)[:, None]
        dx = (scaled - xhat * mean) * rstd[:, None]
        _store_gradient(dx, dsum_ptr, dx_ptr, dx2_ptr, row, n, stride_dsum, column, mask, DSUM, SECOND)
        if REST > 0:
            dx2 = (scaled2 - xhat2 * mean) * rstd[:, None]
            _store_gradient(dx2, dsum_ptr, dx_ptr, dx2_ptr, row, n, stride_dsum, column2, mask2, DSUM, SECOND)
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * n
    tl.store(partial + column, tl.sum(dweight, 0), mask=inside)
    if REST > 0:
        tl.store(partial + column2, tl.sum(dweight2, 0), mask=inside2)


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, y: Tensor, total: Tensor | None,
    rstd: Tensor, blocks: tuple[int, int], config: Any,
) -> None:  # fmt: skip
    """Writes y, rstd and, with a residual, total = x + residual. x, residual [rows, n]; the rest contiguous."""
    rows, n = x.shape
    whole = n == blocks[0] and rows % config.rows == 0 and x.is_contiguous()
    ahead = launched_ahead(x.device)
    with torch.cuda.device_of(x):
        launch(
            rms_norm_forward_kernel, (cdiv(rows, config.rows),),
            x, x if residual is None else residual, weight, y, y if total is None else total, rstd, rows, n,
            x.stride(0), x.stride(0) if residual is None else residual.stride(0), eps,
            RESIDUAL=residual is not None, ROWS=config.rows, BLOCK=blocks[0], REST=blocks[1],
            WHOLE=whole and (residual is None or residual.is_contiguous()), AHEAD=bool(ahead),
            num_warps=config.num_warps, **ahead,
        )  # fmt: skip


def launch_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, dx: Tensor, dx2: Tensor | None,
    dweight: Tensor, programs: int, blocks: tuple[int, int], config: Any,
) -> None:  # fmt: skip
    """Writes dx, dweight and, where given, dx2 (dx in another dtype). dy, dsum, x [rows, n]."""
    rows, n = x.shape
    partial = torch.empty((programs, n), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        launch(
            rms_norm_backward_kernel, (programs,),
            dy, dy if dsum is None else dsum, x, weight, rstd, dx, dx if dx2 is None else dx2, partial,
            rows, n, dy.stride(0), dy.stride(0) if dsum is None else dsum.stride(0), x.stride(0),
            DSUM=dsum is not None, SECOND=dx2 is not None, ROWS=config.rows, BLOCK=blocks[0], REST=blocks[1],
            STAGES=config.num_stages, num_warps=config.num_warps, maxnreg=config.max_registers,
        )  # fmt: skip
    column_sums(partial, dweight)
