# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""RMSNorm in Triton, forward and backward, with and without a residual. Imports triton: import lazily.

A program holds whole rows in registers: ROWS rows of BLOCK >= n columns. The forward takes one tile a program. The
backward is persistent: each program walks over tiles, keeps its share of the weight's gradient in registers, and
leaves one row of partial sums; a second kernel adds these up in a fixed order. No atomics: bit-identical runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.triton_common import column_sums


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, rows, n, stride_x, stride_residual, eps,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    # before the reduction, whose barrier no load is moved across: one latency, not two
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        at = residual_ptr + row[:, None] * stride_residual + column[None, :]
        x += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row[:, None] * n + column[None, :], rounded, mask=mask)
        x = rounded.to(tl.float32)  # what the backward will read
    rstd = tl.rsqrt(tl.sum(x * x, 1) / n + eps)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(y_ptr + row[:, None] * n + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dx2_ptr, partial_ptr,
    rows, n, stride_dy, stride_dsum, stride_x,
    DSUM: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = rstd (w dy - xhat mean(w dy xhat)) + dsum, xhat = x rstd; SECOND writes it in a second dtype too."""
    column = tl.arange(0, BLOCK)
    inside = column < n
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        xhat = x * rstd[:, None]
        scaled = dy * weight[None, :]
        dweight += dy * xhat
        dx = (scaled - xhat * (tl.sum(scaled * xhat, 1) / n)[:, None]) * rstd[:, None]
        if DSUM:
            at = dsum_ptr + row[:, None] * stride_dsum + column[None, :]
            dx += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        out = row[:, None] * n + column[None, :]
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if SECOND:
            tl.store(dx2_ptr + out, dx.to(dx2_ptr.dtype.element_ty), mask=mask)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * n + column
    tl.store(at, tl.sum(dweight, 0), mask=inside)


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, y: Tensor, total: Tensor | None,
    rstd: Tensor, config: Any,
) -> None:  # fmt: skip
    """Writes y, rstd and, with a residual, total = x + residual. x, residual [rows, n]; the rest contiguous."""
    rows, n = x.shape
    with torch.cuda.device_of(x):
        rms_norm_forward_kernel[(triton.cdiv(rows, config.rows),)](
            x, x if residual is None else residual, weight, y, y if total is None else total, rstd, rows, n,
            x.stride(0), x.stride(0) if residual is None else residual.stride(0), eps,
            RESIDUAL=residual is not None, ROWS=config.rows, BLOCK=triton.next_power_of_2(n),
            num_warps=config.num_warps,
        )  # fmt: skip


def launch_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, dx: Tensor, dx2: Tensor | None,
    dweight: Tensor, programs: int, config: Any,
) -> None:  # fmt: skip
    """Writes dx, dweight and, where given, dx2 (dx in another dtype). dy, dsum, x [rows, n]."""
    rows, n = x.shape
    partial = torch.empty((programs, n), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        rms_norm_backward_kernel[(programs,)](
            dy, dy if dsum is None else dsum, x, weight, rstd, dx, dx if dx2 is None else dx2, partial,
            rows, n, dy.stride(0), dy.stride(0) if dsum is None else dsum.stride(0), x.stride(0),
            DSUM=dsum is not None, SECOND=dx2 is not None, ROWS=config.rows,
            BLOCK=triton.next_power_of_2(n), STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    column_sums(partial, dweight)
