# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Query and key RMSNorm with rotary embedding in Triton, both directions. Imports triton: import lazily.

q [B, S, H, D] and k [B, S, KV, D] with any strides but 1 on the last dimension; results contiguous. A tile is ROWS
(token, head) rows, flattened, in two halves of HALF >= D/2 columns, as rotate_half pairs them:

    n = x rstd w        o1 = n1 cos - n2 sin        o2 = n2 cos + n1 sin

cos and sin are [B or 1, S, D]; their second half repeats the first and is not read. The tokens of a tile are
neighbours, so that the tables come from the first-level cache for all heads but one.

The backward walks over tiles. It loads 16-bit rows in pairs, two numbers in an int32, and those of the next tile while
it works on one: in pairs both tiles fit into 128 registers per thread; as numbers they would be widened on arrival. Its
two kernels, of which the second sums the weights' gradients, are launched ahead (`triton_ahead`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch
from flopcast.kernels.sizes import cdiv, next_power_of_2
from flopcast.kernels.triton_ahead import launched_ahead


@triton.jit
def _halves(at, mask, D: tl.constexpr):
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _place(tile, tokens, seq, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """(row, whether it exists, batch, position, head) for each row of a tile."""
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
    """The programs below q_tiles take one tile of queries each, the others one of keys."""
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
def _wide(x, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRED: tl.constexpr, BF16: tl.constexpr):
    """fp32 [ROWS, HALF] of one half of the rows as `_backward_operands` loads it."""
    if PAIRED:
        if BF16:
            low = (x << 16).to(tl.float32, bitcast=True)
            high = (x & -65536).to(tl.float32, bitcast=True)
        else:
            low = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        wide = tl.reshape(tl.join(low, high), (ROWS, HALF))
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _backward_operands(
    dout_ptr, x_ptr, cos_ptr, sin_ptr, tile, tokens, seq, stride_dob, stride_dos, stride_doh,
    stride_b, stride_s, stride_h, stride_tb, stride_ts, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, FLAT: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """(x's halves, the gradient's, cos, sin) of a tile, as they lie in memory; zeros of a tile beyond the last."""
    PER: tl.constexpr = 2 if PAIRED else 1  # numbers in an element
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    head = row % HEADS
    position = token % seq
    exists = token < tokens
    element = tl.arange(0, HALF // PER)
    mask = exists[:, None] & (element < D // 2 // PER)[None, :]
    if FLAT:
        in_x = token.to(tl.int64) * stride_s + head * stride_h
        in_dout = token.to(tl.int64) * stride_dos + head * stride_doh
    else:
        batch = (token // seq).to(tl.int64)
        in_x = batch * stride_b + position.to(tl.int64) * stride_s + head * stride_h
        in_dout = batch * stride_dob + position.to(tl.int64) * stride_dos + head * stride_doh
    at = x_ptr + in_x[:, None] + element[None, :]
    x1 = tl.load(at, mask=mask, other=0)
    x2 = tl.load(at + D // 2 // PER, mask=mask, other=0)
    at = dout_ptr + in_dout[:, None] + element[None, :]
    do1 = tl.load(at, mask=mask, other=0)
    do2 = tl.load(at + D // 2 // PER, mask=mask, other=0)
    column = tl.arange(0, HALF)
    mask = exists[:, None] & (column < D // 2)[None, :]
    table = position.to(tl.int64) * stride_ts
    if stride_tb != 0:
        table += (token // seq).to(tl.int64) * stride_tb
    table = table[:, None] + column[None, :]
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0)
    return x1, x2, do1, do2, cos, sin


@triton.jit
def _backward_tiles(
    dout_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, first, tiles, tokens, seq,
    stride_dob, stride_dos, stride_doh, stride_b, stride_s, stride_h, stride_tb, stride_ts, eps,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, FLAT: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """dx of every num_programs-th tile from `first`; leaves this program's share of the weight's gradient at
    partial_ptr."""
    BF16: tl.constexpr = dx_ptr.dtype.element_ty == tl.bfloat16
    column = tl.arange(0, HALF)
    inside = column < D // 2
    w1, w2 = _halves(weight_ptr + column, inside, D)
    dw1 = tl.zeros((ROWS, HALF), dtype=tl.float32)
    dw2 = tl.zeros((ROWS, HALF), dtype=tl.float32)
    programs = tl.num_programs(0)
    if PAIRED:
        raw_x1, raw_x2, raw_do1, raw_do2, cos, sin = _backward_operands(
            dout_ptr, x_ptr, cos_ptr, sin_ptr, first, tokens, seq, stride_dob, stride_dos, stride_doh,
            stride_b, stride_s, stride_h, stride_tb, stride_ts, HEADS, D, HALF, ROWS, FLAT, PAIRED,
        )  # fmt: skip
    for tile in tl.range(first, tiles, programs, num_stages=1):
        if PAIRED:
            next_x1, next_x2, next_do1, next_do2, next_cos, next_sin = _backward_operands(
                dout_ptr, x_ptr, cos_ptr, sin_ptr, tile + programs, tokens, seq, stride_dob, stride_dos, stride_doh,
                stride_b, stride_s, stride_h, stride_tb, stride_ts, HEADS, D, HALF, ROWS, FLAT, PAIRED,
            )  # fmt: skip
        else:
            raw_x1, raw_x2, raw_do1, raw_do2, cos, sin = _backward_operands(
                dout_ptr, x_ptr, cos_ptr, sin_ptr, tile, tokens, seq, stride_dob, stride_dos, stride_doh,
                stride_b, stride_s, stride_h, stride_tb, stride_ts, HEADS, D, HALF, ROWS, FLAT, PAIRED,
            )  # fmt: skip
        x1 = _wide(raw_x1, ROWS, HALF, PAIRED, BF16)
        x2 = _wide(raw_x2, ROWS, HALF, PAIRED, BF16)
        do1 = _wide(raw_do1, ROWS, HALF, PAIRED, BF16)
        do2 = _wide(raw_do2, ROWS, HALF, PAIRED, BF16)
        wide_cos = cos.to(tl.float32)
        wide_sin = sin.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / D + eps)[:, None]
        x1 *= rstd
        x2 *= rstd
        dn1 = do1 * wide_cos + do2 * wide_sin
        dn2 = do2 * wide_cos - do1 * wide_sin
        dw1 += dn1 * x1
        dw2 += dn2 * x2
        dn1 *= w1[None, :]
        dn2 *= w2[None, :]
        mean = (tl.sum(dn1 * x1 + dn2 * x2, 1) / D)[:, None]
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < tokens * HEADS)[:, None] & inside[None, :]
        at = dx_ptr + row.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(at, ((dn1 - x1 * mean) * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(at + D // 2, ((dn2 - x2 * mean) * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
        if PAIRED:
            raw_x1, raw_x2, raw_do1, raw_do2 = next_x1, next_x2, next_do1, next_do2
            cos, sin = next_cos, next_sin
    tl.store(partial_ptr + column, tl.sum(dw1, 0), mask=inside)
    tl.store(partial_ptr + D // 2 + column, tl.sum(dw2, 0), mask=inside)


@triton.jit
def rope_backward_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr,
    partial_ptr, tokens, seq, q_tiles, k_tiles,
    stride_dqb, stride_dqs, stride_dqh, stride_dkb, stride_dks, stride_dkh,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_tb, stride_ts, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    FLAT: tl.constexpr, PAIRED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Persistent: every program takes its share of the tiles of queries, then of keys. The programs with one tile of
    queries less come first for keys, so that there are no more rounds than all tiles take.

    partial: fp32 [programs, 2, D].

    FLAT: a token's place is its number times stride_*s, whatever its batch. PAIRED: q, k and their gradients are
    passed as int32, two numbers each, strides accordingly.
    """
    if AHEAD:
        # before any access: the gradients may be what the kernel before writes; dq, dk or the shares lie where the
        # one before reads, or where the last call's sum does
        tl.extra.cuda.gdc_wait()
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    partial = partial_ptr + program * 2 * D
    _backward_tiles(
        dq_out_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, dq_ptr, partial, program, q_tiles, tokens, seq,
        stride_dqb, stride_dqs, stride_dqh, stride_qb, stride_qs, stride_qh, stride_tb, stride_ts, eps,
        HEADS, D, HALF, ROWS, FLAT, PAIRED,
    )  # fmt: skip
    _backward_tiles(
        dk_out_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, dk_ptr, partial + D,
        (program + programs - q_tiles % programs) % programs, k_tiles, tokens, seq,
        stride_dkb, stride_dks, stride_dkh, stride_kb, stride_ks, stride_kh, stride_tb, stride_ts, eps,
        KV_HEADS, D, HALF, ROWS, FLAT, PAIRED,
    )  # fmt: skip
    if AHEAD:
        # the sum may start as programs leave: it waits for the end of all before it reads a share
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def share_sum_kernel(partial_ptr, out_ptr, count, n, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, AHEAD: tl.constexpr):
    """out[n] = the sum of partial[count, n] (fp32) over its rows, in one fixed order."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < n
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    if AHEAD:
        # before any access: the shares are what the kernel before writes
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, count, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < count)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + rows[:, None] * n + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=inside)


def _table_strides(cos: Tensor) -> tuple[int, int]:
    """(batch, token) strides of a table; 0 for the batch where one serves all."""
    return (cos.stride(0) if cos.shape[0] > 1 else 0), cos.stride(1)


def _sizes(q: Tensor, k: Tensor, config: Any) -> tuple[int, int, int, dict[str, int]]:
    """(tokens, tiles of q, tiles of k, the constants of both kernels)."""
    batch, seq, heads, dim = q.shape
    tokens = batch * seq
    constants = {
        "HEADS": heads, "KV_HEADS": k.shape[2], "D": dim, "HALF": next_power_of_2(dim // 2),
        "ROWS": config.rows,
    }  # fmt: skip
    return (tokens, cdiv(tokens * heads, config.rows), cdiv(tokens * k.shape[2], config.rows), constants)


def launch_forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    q_out: Tensor, k_out: Tensor, config: Any,
) -> None:  # fmt: skip
    tokens, q_tiles, k_tiles, constants = _sizes(q, k, config)
    with torch.cuda.device_of(q):
        launch(
            rope_forward_kernel, (q_tiles + k_tiles,),
            q, k, q_weight, k_weight, cos, sin, q_out, k_out, tokens, q.shape[1], q_tiles,
            *q.stride()[:3], *k.stride()[:3], *_table_strides(cos), eps, **constants,
            num_warps=config.num_warps,
        )  # fmt: skip


def _flat(x: Tensor) -> bool:
    """Whether batches of [B, S, H, D] follow one another as tokens do."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _pairs(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether x is 16-bit, of `dtype`, and its halves of rows can be loaded as int32."""
    return (
        x.dtype == dtype
        and x.element_size() == 2
        and x.shape[-1] % 4 == 0
        and x.data_ptr() % 4 == 0
        and x.storage_offset() % 2 == 0
        and all(stride % 2 == 0 for stride in x.stride()[:-1])
    )


def launch_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, eps: float, dq: Tensor, dk: Tensor, dweights: Tensor, programs: int, config: Any,
) -> None:  # fmt: skip
    """Writes dq, dk (contiguous) and dweights [2, D]."""
    tokens, q_tiles, k_tiles, constants = _sizes(q, k, config)
    partial = torch.empty((programs, dweights.numel()), dtype=torch.float32, device=q.device)
    rows: tuple[Tensor, ...] = (dq_out, dk_out, q, k)
    flat, paired = all(map(_flat, rows)), all(_pairs(x, q.dtype) for x in rows)
    if paired:
        rows = tuple(x.view(torch.int32) for x in rows)
    ahead = launched_ahead(q.device)
    # Each program of the sum makes all its loads at once, and there are enough programs to keep these few: one latency.
    block = min(4096, max(64, next_power_of_2(programs)))
    with torch.cuda.device_of(q):
        launch(
            rope_backward_kernel, (programs,),
            *rows, q_weight, k_weight, cos, sin, dq, dk, partial, tokens, q.shape[1], q_tiles, k_tiles,
            *(stride for x in rows for stride in x.stride()[:3]), *_table_strides(cos), eps, **constants,
            FLAT=flat, PAIRED=paired, AHEAD=bool(ahead), num_warps=config.num_warps,
            maxnreg=config.max_registers, **ahead,
        )  # fmt: skip
        launch(
            share_sum_kernel, (cdiv(dweights.numel(), 8),),
            partial, dweights, programs, dweights.numel(), BLOCK_P=block, BLOCK_C=8, AHEAD=bool(ahead),
            num_warps=32 if block > 2048 else 16 if block > 512 else 8, **ahead,
        )  # fmt: skip
