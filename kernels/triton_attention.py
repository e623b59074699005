# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton attention, forward and backward, causal or full, with grouped key-value heads, windows and documents.

Imports triton: import this module inside functions only.

Tensors are [batch, heads, seq, head_dim] with any strides but 1 on the last dimension. Names: S scores, P
probabilities, M query rows, N key rows, D head_dim. Softmax works in base 2 (exp2 is one instruction);
lse is natural, fp32 [batch, heads, seq].

The backward is two kernels without atomics, hence deterministic: dK and dV per key block, looping over the
query heads of its group, and dQ per query block. Both recompute P; the first as P^T = exp2(K Q^T - lse), so
that no result of a dot is ever transposed (silently wrong on Hopper: flash-linear-attention issue 640). Seven
products are made where five are counted.

With a WINDOW a query sees that many keys, itself the last; with documents (`kernels/documents.py`) those of its own.
Then the keys of a query are a range, and so are the queries of a key; both ends move forward only. Blocks outside of
all ranges are not visited, and only those that are not inside all are masked. Without either (BANDED is false) the code
is the same as if there were none.

Rows past seq load as zero; as query rows their lse reads +inf, so that P = 0; as key rows they are masked.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch
from flopcast.kernels.sizes import cdiv

LOG2_E = 1.4426950408889634


@triton.jit
def _rows(base, start, stride, seq, BLOCK: tl.constexpr, D: tl.constexpr):
    """Rows [start, start + BLOCK) of a [seq, D] matrix, zero past seq."""
    rows = tl.arange(0, BLOCK)
    tile = base + start.to(tl.int64) * stride + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(tile, mask=(start + rows < seq)[:, None], other=0.0)


@triton.jit
def _columns(base, start, stride, seq, BLOCK: tl.constexpr, D: tl.constexpr):
    """The same rows as columns: [D, BLOCK]."""
    rows = tl.arange(0, BLOCK)
    tile = base + start.to(tl.int64) * stride + rows[None, :] * stride + tl.arange(0, D)[:, None]
    return tl.load(tile, mask=(start + rows < seq)[None, :], other=0.0)


@triton.jit
def _store_rows(base, value, start, stride, seq, BLOCK: tl.constexpr, D: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    tile = base + start.to(tl.int64) * stride + rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(tile, value.to(base.dtype.element_ty), mask=(start + rows < seq)[:, None])


@triton.jit
def _keys_of(rows, spans, seq, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that queries see, and the one past the last. spans: of this batch, int32 [2, seq], or None."""
    low = rows * 0
    high = rows * 0 + seq
    if spans is not None:
        low = tl.load(spans + rows, mask=rows < seq, other=0)
        high = tl.load(spans + seq + rows, mask=rows < seq, other=0)
    if WINDOW:
        low = tl.maximum(low, rows - (WINDOW - 1))
    if CAUSAL:
        high = rows + 1
    return low, high


@triton.jit
def _queries_of(columns, spans, seq, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The first query that sees a key, and the one past the last."""
    low = columns * 0
    high = columns * 0 + seq
    if spans is not None:
        low = tl.load(spans + columns, mask=columns < seq, other=0)
        high = tl.load(spans + seq + columns, mask=columns < seq, other=0)
    if CAUSAL:
        low = columns
    if WINDOW:
        high = tl.minimum(high, columns + WINDOW)
    return low, high


@triton.jit
def _passes(first_low, first_high, last_low, last_high, BLOCK: tl.constexpr):
    """(begin, inside, past, end) in blocks, of a tile whose first and last row have these ranges: [begin, end) is what
    any row sees, [inside, past) what all rows see whole."""
    begin = first_low // BLOCK
    end = tl.cdiv(last_high, BLOCK)
    inside = tl.minimum(tl.cdiv(last_low, BLOCK), end)
    past = tl.maximum(first_high // BLOCK, inside)
    return begin, inside, past, end


@triton.jit
def _forward_blocks(
    acc, row_sum, row_max, q, k_base, v_base, stride_ks, stride_vs, start_m, low, high, first, last, seq, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BANDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """One online-softmax pass over the key blocks [first, last)."""
    for block in range(first, last):
        start_n = block * BLOCK_N
        k_t = _columns(k_base, start_n, stride_ks, seq, BLOCK_N, D)
        scores = tl.dot(q, k_t, input_precision="ieee") * scale_log2
        if MASKED:
            columns = start_n + tl.arange(0, BLOCK_N)
            if BANDED:
                seen = (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            else:
                scores = tl.where((columns < seq)[None, :], scores, float("-inf"))
                if CAUSAL:
                    rows = start_m + tl.arange(0, BLOCK_M)
                    scores = tl.where(columns[None, :] <= rows[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max  # finite without a band: every row sees key 0 in its first block
        if BANDED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # of a row that saw nothing so far
        p = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(row_max - shift)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        v = _rows(v_base, start_n, stride_vs, seq, BLOCK_N, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, spans_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    heads, group, seq, scale_log2,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(1)
    if CAUSAL:
        pid = tl.num_programs(1) - 1 - pid  # longest rows first: a shorter tail
    start_m = pid * BLOCK_M
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    k_base = k_ptr + batch * stride_kb + head // group * stride_kh
    v_base = v_ptr + batch * stride_vb + head // group * stride_vh

    q = _rows(q_ptr + batch * stride_qb + head * stride_qh, start_m, stride_qs, seq, BLOCK_M, D)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    BANDED: tl.constexpr = WINDOW > 0 or spans_ptr is not None
    inside = 0
    low = 0
    high = 0
    if BANDED:
        spans = spans_ptr
        if spans_ptr is not None:
            spans += batch * 2 * seq
        low, high = _keys_of(start_m + tl.arange(0, BLOCK_M), spans, seq, CAUSAL, WINDOW)
        first_low, first_high = _keys_of(start_m, spans, seq, CAUSAL, WINDOW)
        last_low, last_high = _keys_of(min(start_m + BLOCK_M, seq) - 1, spans, seq, CAUSAL, WINDOW)
        begin, inside, unmasked, last = _passes(first_low, first_high, last_low, last_high, BLOCK_N)
        acc, row_sum, row_max = _forward_blocks(
            acc, row_sum, row_max, q, k_base, v_base, stride_ks, stride_vs, start_m, low, high, begin, inside, seq,
            scale_log2, True, CAUSAL, BANDED, BLOCK_M, BLOCK_N, D,
        )  # fmt: skip
    elif CAUSAL:
        unmasked = start_m // BLOCK_N
        last = tl.cdiv(min(start_m + BLOCK_M, seq), BLOCK_N)
    else:
        unmasked = seq // BLOCK_N
        last = tl.cdiv(seq, BLOCK_N)
    acc, row_sum, row_max = _forward_blocks(
        acc, row_sum, row_max, q, k_base, v_base, stride_ks, stride_vs, start_m, low, high, inside, unmasked, seq,
        scale_log2, False, CAUSAL, BANDED, BLOCK_M, BLOCK_N, D,
    )  # fmt: skip
    acc, row_sum, row_max = _forward_blocks(
        acc, row_sum, row_max, q, k_base, v_base, stride_ks, stride_vs, start_m, low, high, unmasked, last, seq,
        scale_log2, True, CAUSAL, BANDED, BLOCK_M, BLOCK_N, D,
    )  # fmt: skip
    o_base = o_ptr + batch * stride_ob + head * stride_oh
    _store_rows(o_base, acc / row_sum[:, None], start_m, stride_os, seq, BLOCK_M, D)
    rows = start_m + tl.arange(0, BLOCK_M)
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + (batch * heads + head) * seq + rows, lse, mask=rows < seq)


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, delta_ptr,
    stride_ob, stride_oh, stride_os, stride_dob, stride_doh, stride_dos,
    heads, seq, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(o do), which equals rowsum(P dP): fp32 [batch, heads, seq]."""
    start_m = tl.program_id(1) * BLOCK_M
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    o = _rows(o_ptr + batch * stride_ob + head * stride_oh, start_m, stride_os, seq, BLOCK_M, D)
    do = _rows(do_ptr + batch * stride_dob + head * stride_doh, start_m, stride_dos, seq, BLOCK_M, D)
    rows = start_m + tl.arange(0, BLOCK_M)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + (batch * heads + head) * seq + rows, delta, mask=rows < seq)


@triton.jit
def _dkdv_blocks(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, stride_qs, stride_dos, start_n, low, high, first, last,
    seq, scale_log2, MASKED: tl.constexpr, BANDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    for block in range(first, last):
        start_m = block * BLOCK_M
        rows = start_m + tl.arange(0, BLOCK_M)
        q = _rows(q_base, start_m, stride_qs, seq, BLOCK_M, D)
        lse = tl.load(lse_base + rows, mask=rows < seq, other=float("inf"))
        p_t = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2 - lse[None, :] * 1.4426950408889634)
        if MASKED:
            if BANDED:
                p_t = tl.where((rows[None, :] >= low[:, None]) & (rows[None, :] < high[:, None]), p_t, 0.0)
            else:
                columns = start_n + tl.arange(0, BLOCK_N)
                p_t = tl.where(columns[:, None] <= rows[None, :], p_t, 0.0)
        do = _rows(do_base, start_m, stride_dos, seq, BLOCK_M, D)
        dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision="ieee")
        dp_t = tl.dot(v, tl.trans(do), input_precision="ieee")
        delta = tl.load(delta_base + rows, mask=rows < seq, other=0.0)
        ds_t = p_t * (dp_t - delta[None, :])
        dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, spans_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_dob, stride_doh, stride_dos,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    heads, group, seq, scale, scale_log2,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key block: the sum over the query heads of its group is made here, in registers."""
    start_n = tl.program_id(1) * BLOCK_N  # causal: early key blocks see the most queries, and go first
    kv_heads = heads // group
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    k = _rows(k_ptr + batch * stride_kb + kv_head * stride_kh, start_n, stride_ks, seq, BLOCK_N, D)
    v = _rows(v_ptr + batch * stride_vb + kv_head * stride_vh, start_n, stride_vs, seq, BLOCK_N, D)
    dk = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    blocks = tl.cdiv(seq, BLOCK_M)
    BANDED: tl.constexpr = WINDOW > 0 or spans_ptr is not None
    low = 0
    high = 0
    if BANDED:
        spans = spans_ptr
        if spans_ptr is not None:
            spans += batch * 2 * seq
        low, high = _queries_of(start_n + tl.arange(0, BLOCK_N), spans, seq, CAUSAL, WINDOW)
        first_low, first_high = _queries_of(start_n, spans, seq, CAUSAL, WINDOW)
        last_low, last_high = _queries_of(min(start_n + BLOCK_N, seq) - 1, spans, seq, CAUSAL, WINDOW)
        begin, inside, past, end = _passes(first_low, first_high, last_low, last_high, BLOCK_M)
    for member in range(group):
        head = kv_head * group + member
        q_base = q_ptr + batch * stride_qb + head * stride_qh
        do_base = do_ptr + batch * stride_dob + head * stride_doh
        lse_base = lse_ptr + (batch * heads + head) * seq
        delta_base = delta_ptr + (batch * heads + head) * seq
        # Key rows past seq need no mask here: they make garbage in rows of dk and dv that are not stored.
        first_unmasked = 0
        last_unmasked = blocks
        if BANDED:
            first_unmasked = inside
            last_unmasked = past
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_base, do_base, lse_base, delta_base, stride_qs, stride_dos,
                start_n, low, high, begin, inside, seq, scale_log2, True, BANDED, BLOCK_M, BLOCK_N, D,
            )  # fmt: skip
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_base, do_base, lse_base, delta_base, stride_qs, stride_dos,
                start_n, low, high, past, end, seq, scale_log2, True, BANDED, BLOCK_M, BLOCK_N, D,
            )  # fmt: skip
        elif CAUSAL:
            first_unmasked = min(tl.cdiv(start_n + BLOCK_N, BLOCK_M), blocks)
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_base, do_base, lse_base, delta_base, stride_qs, stride_dos,
                start_n, low, high, start_n // BLOCK_M, first_unmasked, seq, scale_log2, True, BANDED,
                BLOCK_M, BLOCK_N, D,
            )  # fmt: skip
        dk, dv = _dkdv_blocks(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, stride_qs, stride_dos,
            start_n, low, high, first_unmasked, last_unmasked, seq, scale_log2, False, BANDED, BLOCK_M, BLOCK_N, D,
        )  # fmt: skip
    _store_rows(dk_ptr + batch * stride_dkb + kv_head * stride_dkh, dk * scale, start_n, stride_dks, seq, BLOCK_N, D)
    _store_rows(dv_ptr + batch * stride_dvb + kv_head * stride_dvh, dv, start_n, stride_dvs, seq, BLOCK_N, D)


@triton.jit
def _dq_blocks(
    dq, q, do, lse_log2, delta, k_base, v_base, stride_ks, stride_vs, start_m, low, high, first, last, seq, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BANDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    for block in range(first, last):
        start_n = block * BLOCK_N
        k = _rows(k_base, start_n, stride_ks, seq, BLOCK_N, D)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 - lse_log2[:, None])
        if MASKED:
            columns = start_n + tl.arange(0, BLOCK_N)
            if BANDED:
                p = tl.where((columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None]), p, 0.0)
            else:
                p = tl.where((columns < seq)[None, :], p, 0.0)
                if CAUSAL:
                    rows = start_m + tl.arange(0, BLOCK_M)
                    p = tl.where(columns[None, :] <= rows[:, None], p, 0.0)
        v_t = _columns(v_base, start_n, stride_vs, seq, BLOCK_N, D)
        ds = p * (tl.dot(do, v_t, input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, spans_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_dob, stride_doh, stride_dos, stride_dqb, stride_dqh, stride_dqs,
    heads, group, seq, scale, scale_log2,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(1)
    if CAUSAL:
        pid = tl.num_programs(1) - 1 - pid
    start_m = pid * BLOCK_M
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    k_base = k_ptr + batch * stride_kb + head // group * stride_kh
    v_base = v_ptr + batch * stride_vb + head // group * stride_vh
    q = _rows(q_ptr + batch * stride_qb + head * stride_qh, start_m, stride_qs, seq, BLOCK_M, D)
    do = _rows(do_ptr + batch * stride_dob + head * stride_doh, start_m, stride_dos, seq, BLOCK_M, D)
    rows = start_m + tl.arange(0, BLOCK_M)
    of_head = (batch * heads + head) * seq
    lse_log2 = tl.load(lse_ptr + of_head + rows, mask=rows < seq, other=float("inf")) * 1.4426950408889634
    delta = tl.load(delta_ptr + of_head + rows, mask=rows < seq, other=0.0)
    dq = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    BANDED: tl.constexpr = WINDOW > 0 or spans_ptr is not None
    inside = 0
    low = 0
    high = 0
    if BANDED:
        spans = spans_ptr
        if spans_ptr is not None:
            spans += batch * 2 * seq
        low, high = _keys_of(rows, spans, seq, CAUSAL, WINDOW)
        first_low, first_high = _keys_of(start_m, spans, seq, CAUSAL, WINDOW)
        last_low, last_high = _keys_of(min(start_m + BLOCK_M, seq) - 1, spans, seq, CAUSAL, WINDOW)
        begin, inside, unmasked, last = _passes(first_low, first_high, last_low, last_high, BLOCK_N)
        dq = _dq_blocks(
            dq, q, do, lse_log2, delta, k_base, v_base, stride_ks, stride_vs, start_m, low, high, begin, inside, seq,
            scale_log2, True, CAUSAL, BANDED, BLOCK_M, BLOCK_N, D,
        )  # fmt: skip
    elif CAUSAL:
        unmasked = start_m // BLOCK_N
        last = tl.cdiv(min(start_m + BLOCK_M, seq), BLOCK_N)
    else:
        unmasked = seq // BLOCK_N
        last = tl.cdiv(seq, BLOCK_N)
    dq = _dq_blocks(
        dq, q, do, lse_log2, delta, k_base, v_base, stride_ks, stride_vs, start_m, low, high, inside, unmasked, seq,
        scale_log2, False, CAUSAL, BANDED, BLOCK_M, BLOCK_N, D,
    )  # fmt: skip
    dq = _dq_blocks(
        dq, q, do, lse_log2, delta, k_base, v_base, stride_ks, stride_vs, start_m, low, high, unmasked, last, seq,
        scale_log2, True, CAUSAL, BANDED, BLOCK_M, BLOCK_N, D,
    )  # fmt: skip
    _store_rows(dq_ptr + batch * stride_dqb + head * stride_dqh, dq * scale, start_m, stride_dqs, seq, BLOCK_M, D)


def interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when this module was imported: the kernels then run on CPU tensors."""
    return not isinstance(forward_kernel, triton.JITFunction)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, config: Any,
    window: int = 0, spans: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes o and lse, by an `AttentionConfig`. window: 0 for none; spans: of documents."""
    batch, heads, seq, dim = q.shape
    tile = config.forward
    grid = (batch * heads, cdiv(seq, tile.block_m))  # y is limited to 65,535
    with torch.cuda.device_of(q):
        launch(
            forward_kernel, grid,
            q, k, v, o, lse, spans, *_strides(q, k, v, o), heads, heads // k.shape[1], seq, scale * LOG2_E,
            CAUSAL=causal, WINDOW=window, D=dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    causal: bool, scale: float, config: Any, window: int = 0, spans: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes dq, dk and dv; three launches (delta, dK and dV, dQ)."""
    batch, heads, seq, dim = q.shape
    group = heads // k.shape[1]
    delta = torch.empty_like(lse)
    with torch.cuda.device_of(q):
        block = 64
        launch(
            delta_kernel,
            (batch * heads, cdiv(seq, block)),
            o,
            do,
            delta,
            *_strides(o, do),
            heads,
            seq,
            D=dim,
            BLOCK_M=block,
            num_warps=4,
        )
        tile = config.dkdv
        launch(
            dkdv_kernel, (batch * k.shape[1], cdiv(seq, tile.block_n)),
            q, k, v, do, lse, delta, dk, dv, spans, *_strides(q, k, v, do, dk, dv), heads, group, seq, scale,
            scale * LOG2_E, CAUSAL=causal, WINDOW=window, D=dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        tile = config.dq
        launch(
            dq_kernel, (batch * heads, cdiv(seq, tile.block_m)),
            q, k, v, do, lse, delta, dq, spans, *_strides(q, k, v, do, dq), heads, group, seq, scale,
            scale * LOG2_E, CAUSAL=causal, WINDOW=window, D=dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
