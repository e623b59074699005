# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Query and key RMSNorm with rotary embedding in Triton, both directions. Imports triton: import lazily.

q [B, S, H, D] and k [B, S, KV, D] with any strides but 1 on the last dimension; results contiguous. A tile is ROWS
(token, head) rows, flattened, in two halves of HALF >= D/2 columns, as rotate_half pairs them:

    n = x rstd w        o1 = n1 cos - n2 sin        o2 = n2 cos + n1 sin

cos and sin are [B or 1, S, D]; their second half repeats the first and is not read. The tokens of a tile are
neighbours, so that the tables come from the first-level cache for all heads but one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.triton_common import column_sums


@triton.jit
def _halves(at, mask, D: tl.constexpr):
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _place(tile, tokens, seq, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """(row, whether it exists, batch, position, head) of the rows of a tile."""
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    batch = (token // seq).to(tl.int64)
    return row.to(tl.int64), token < tokens, batch, (token % seq).to(tl.int64), row % HEADS


@triton.jit
def _forward_tile(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, tile, tokens, seq, stride_b, stride_s, stride_h,
    stride_tb, stride_ts, eps, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, exists, batch, position, head = _place(tile, tokens, seq, HEADS, ROWS)
    column = tl.arange(0, HALF)
    inside = column < D // 2
    mask = exists[:, None] & inside[None, :]
    base = batch * stride_b + position * stride_s + head * stride_h
    x1, x2 = _halves(x_ptr + base[:, None] + column[None, :], mask, D)
    table = (batch * stride_tb + position * stride_ts)[:, None] + column[None, :]
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)
    w1, w2 = _halves(weight_ptr + column, inside, D)
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / D + eps)
    n1 = x1 * rstd[:, None] * w1[None, :]
    n2 = x2 * rstd[:, None] * w2[None, :]
    at = out_ptr + row[:, None] * D + column[None, :]
    tl.store(at, (n1 * cos - n2 * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(at + D // 2, (n2 * cos + n1 * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rope_forward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, tokens, seq, q_tiles,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_tb, stride_ts, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs below q_tiles take queries, the others keys."""
    tile = tl.program_id(0)
    if tile < q_tiles:
        _forward_tile(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, tile, tokens, seq, stride_qb, stride_qs,
            stride_qh, stride_tb, stride_ts, eps, HEADS, D, HALF, ROWS,
        )  # fmt: skip
    else:
        _forward_tile(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_out_ptr, tile - q_tiles, tokens, seq, stride_kb,
            stride_ks, stride_kh, stride_tb, stride_ts, eps, KV_HEADS, D, HALF, ROWS,
        )  # fmt: skip


@triton.jit
def _backward_tiles(
    dout_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, first, tiles, tokens, seq,
    stride_dob, stride_dos, stride_doh, stride_b, stride_s, stride_h, stride_tb, stride_ts, eps,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every num_programs-th tile from `first`; leaves this program's share of the weight's gradient at
    partial_ptr."""
    column = tl.arange(0, HALF)
    inside = column < D // 2
    w1, w2 = _halves(weight_ptr + column, inside, D)
    dw1 = tl.zeros((ROWS, HALF), dtype=tl.float32)
    dw2 = tl.zeros((ROWS, HALF), dtype=tl.float32)
    for tile in tl.range(first, tiles, tl.num_programs(0), num_stages=STAGES):
        row, exists, batch, position, head = _place(tile, tokens, seq, HEADS, ROWS)
        mask = exists[:, None] & inside[None, :]
        base = batch * stride_b + position * stride_s + head * stride_h
        x1, x2 = _halves(x_ptr + base[:, None] + column[None, :], mask, D)
        base = batch * stride_dob + position * stride_dos + head * stride_doh
        do1, do2 = _halves(dout_ptr + base[:, None] + column[None, :], mask, D)
        table = (batch * stride_tb + position * stride_ts)[:, None] + column[None, :]
        cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / D + eps)[:, None]
        x1 *= rstd
        x2 *= rstd
        dn1 = do1 * cos + do2 * sin
        dn2 = do2 * cos - do1 * sin
        dw1 += dn1 * x1
        dw2 += dn2 * x2
        dn1 *= w1[None, :]
        dn2 *= w2[None, :]
        mean = (tl.sum(dn1 * x1 + dn2 * x2, 1) / D)[:, None]
        at = dx_ptr + row[:, None] * D + column[None, :]
        tl.store(at, ((dn1 - x1 * mean) * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(at + D // 2, ((dn2 - x2 * mean) * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + column, tl.sum(dw1, 0), mask=inside)
    tl.store(partial_ptr + D // 2 + column, tl.sum(dw2, 0), mask=inside)


@triton.jit
def rope_backward_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr,
    partial_ptr, tokens, seq, q_tiles, k_tiles,
    stride_dqb, stride_dqs, stride_dqh, stride_dkb, stride_dks, stride_dkh,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_tb, stride_ts, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent: every program takes its share of queries, then of keys, first of which come those with a tile of
    queries less: no more rounds than all tiles take. partial: fp32 [programs, 2, D]."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    partial = partial_ptr + program * 2 * D
    _backward_tiles(
        dq_out_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, dq_ptr, partial, program, q_tiles, tokens, seq,
        stride_dqb, stride_dqs, stride_dqh, stride_qb, stride_qs, stride_qh, stride_tb, stride_ts, eps,
        HEADS, D, HALF, ROWS, STAGES,
    )  # fmt: skip
    _backward_tiles(
        dk_out_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, dk_ptr, partial + D,
        (program + programs - q_tiles % programs) % programs, k_tiles, tokens, seq,
        stride_dkb, stride_dks, stride_dkh, stride_kb, stride_ks, stride_kh, stride_tb, stride_ts, eps,
        KV_HEADS, D, HALF, ROWS, STAGES,
    )  # fmt: skip


def _table_strides(cos: Tensor) -> tuple[int, int]:
    """A table of one batch serves all."""
    return (cos.stride(0) if cos.shape[0] > 1 else 0), cos.stride(1)


def _sizes(q: Tensor, k: Tensor, config: Any) -> tuple[int, int, int, dict[str, int]]:
    """(tokens, tiles of q, tiles of k, the constants of both kernels)."""
    batch, seq, heads, dim = q.shape
    tokens = batch * seq
    constants = {
        "HEADS": heads, "KV_HEADS": k.shape[2], "D": dim, "HALF": triton.next_power_of_2(dim // 2),
        "ROWS": config.rows,
    }  # fmt: skip
    return (
        tokens,
        triton.cdiv(tokens * heads, config.rows),
        triton.cdiv(tokens * k.shape[2], config.rows),
        constants,
    )


def launch_forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    q_out: Tensor, k_out: Tensor, config: Any,
) -> None:  # fmt: skip
    tokens, q_tiles, k_tiles, constants = _sizes(q, k, config)
    with torch.cuda.device_of(q):
        rope_forward_kernel[(q_tiles + k_tiles,)](
            q, k, q_weight, k_weight, cos, sin, q_out, k_out, tokens, q.shape[1], q_tiles,
            *q.stride()[:3], *k.stride()[:3], *_table_strides(cos), eps, **constants,
            num_warps=config.num_warps,
        )  # fmt: skip


def launch_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, eps: float, dq: Tensor, dk: Tensor, dweights: Tensor, programs: int, config: Any,
) -> None:  # fmt: skip
    """Writes dq, dk (contiguous) and dweights [2, D]."""
    tokens, q_tiles, k_tiles, constants = _sizes(q, k, config)
    partial = torch.empty((programs, dweights.numel()), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        rope_backward_kernel[(programs,)](
            dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, dq, dk, partial, tokens, q.shape[1], q_tiles,
            k_tiles, *dq_out.stride()[:3], *dk_out.stride()[:3], *q.stride()[:3], *k.stride()[:3],
            *_table_strides(cos), eps, **constants, STAGES=config.num_stages, num_warps=config.num_warps,
            maxnreg=config.max_registers,
        )  # fmt: skip
    column_sums(partial, dweights)
