# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: SIM102 - partitions share tuples of arguments; an `if` at compile time is kept apart
"""The backward of attention for Hopper in one pass, in Gluon: five products, but dQ is summed by atomics.

Imports triton: import this module inside functions only.

The kernel of dK and dV (`triton_attention_hopper_dkdv`), whose two warpgroups also exchange dS^T through shared memory
and multiply it with K: each for one half of the columns of dQ or, with TURNS, each for every other block of queries.
Partial sums of dQ go to an fp32 buffer in an order that differs from run to run, and so do the last bits of dQ.
`scale_kernel` then writes dQ.

Not chosen by any rule or table yet: wrong when it last ran on a GPU (2026-11-21: half of dK and dV were stored from the
wrong place), corrected since, not run since. `benchmarks/attention_tune.py` checks it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flopcast.kernels.triton_attention_hopper import barriers, load_rows, rounds_of, store_rows, tile_of
from flopcast.kernels.triton_attention_hopper_dkdv import dkdv_tile, load_queries, load_vector


@triton.jit
def scale_kernel(
    sums_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqs, heads, seq, padded, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dq = scale * sums, from fp32 [batch * heads, padded, D]."""
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, D)[None, :]
    sums = tl.load(sums_ptr + (row * padded + rows) * D + columns, mask=rows < seq, other=0.0)
    out = dq_ptr + row // heads * stride_dqb + row % heads * stride_dqh + rows * stride_dqs + columns
    tl.store(out, (sums * scale).to(dq_ptr.dtype.element_ty), mask=rows < seq)


@gluon.jit
def _load(
    key_descs, descs, key_bars, bars, key_bufs, bufs, sizes,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_desc, v_desc, _, _ = key_descs
    kv_full, kv_empty, _ = key_bars
    k_buf, v_buf = key_bufs
    kv_heads, group, seq, _, pairs, tiles, section = sizes
    it = 0
    for turn in range(rounds_of(tiles)):
        batch, kv_head, start, first = dkdv_tile(
            tile_of(turn), kv_heads, seq, pairs, section, CAUSAL, SECTIONS, BLOCK_M
        )
        mbarrier.wait(kv_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(kv_full.index(0), 2 * k_desc.block_type.nbytes)
        load_rows(k_desc, batch, kv_head, start, kv_full.index(0), k_buf)
        load_rows(v_desc, batch, kv_head, start, kv_full.index(0), v_buf)
        blocks = gl.cdiv(seq, BLOCK_M)
        it = load_queries(
            descs, bars, bufs, batch, kv_head, kv_heads, group, first, blocks, it, BLOCK_M, STAGES
        )


@gluon.jit
def _compute(
    w: gl.constexpr, key_descs, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, sizes, sums_ptr, scale,
    scale_log2, CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    k_desc, _, dk_desc, dv_desc = key_descs
    kv_full, kv_empty, kv_done = key_bars
    q_full, q_empty, do_full, do_empty = bars
    ds_full, ds_empty = ds_bars
    k_buf, v_buf = key_bufs
    q_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    kv_heads, group, seq, padded, pairs, tiles, section = sizes
    D: gl.constexpr = k_desc.block_type.shape[3]
    PART: gl.constexpr = D if TURNS else D // 2
    dtype: gl.constexpr = k_desc.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    KEY: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    k = k_buf.slice(64 * w, 64, 0)
    v = v_buf.slice(64 * w, 64, 0)
    k_part = k_buf.slice((D - PART) * w, PART, 1)
    zero = gl.zeros([64, BLOCK_M], gl.float32, S_LAYOUT)
    dq_zero = gl.zeros([BLOCK_M, PART], gl.float32, DQ_LAYOUT)
    dq_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, DQ_LAYOUT))
    dq_cols = (D - PART) * w + gl.arange(0, PART, gl.SliceLayout(0, DQ_LAYOUT))
    dq_at = dq_rows[:, None] * D + dq_cols[None, :]
    it = 0
    for turn in range(rounds_of(tiles)):
        batch, kv_head, start, first = dkdv_tile(
            tile_of(turn), kv_heads, seq, pairs, section, CAUSAL, SECTIONS, BLOCK_M
        )
        keys = start + 64 * w + gl.arange(0, 64, KEY)
        dk = gl.zeros([64, D], gl.float32, D_LAYOUT)
        dv = gl.zeros([64, D], gl.float32, D_LAYOUT)
        mbarrier.wait(kv_full.index(0), turn & 1)
        for member in range(group):
            head = kv_head * group + member
            sums = sums_ptr + (batch * (kv_heads * group) + head).to(gl.int64) * padded * D
            for block in range(first, gl.cdiv(seq, BLOCK_M)):
                slot = it % STAGES
                phase = it // STAGES & 1
                q = q_bufs.index(slot)
                do = do_bufs.index(slot)
                mbarrier.wait(q_full.index(slot), phase)
                s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(do_full.index(slot), phase)
                dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
                lse = load_vector(lse_bufs.index(slot), BLOCK_M, ROW)
                s = warpgroup_mma_wait(1, deps=(s,))
                p = gl.exp2(s * scale_log2 - lse[None, :])
                if CAUSAL:
                    if block * BLOCK_M < start + 64 * w + 64:
                        rows = block * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
                        p = gl.where(keys[:, None] <= rows[None, :], p, 0.0)
                p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)
                ds_slot = it % 2
                ds_phase = it // 2 & 1
                mbarrier.wait(
                    ds_empty.index(ds_slot), ds_phase ^ 1
                )  # also keeps the next wait below the softmax
                dp, p16 = warpgroup_mma_wait(0, deps=(dp, p16))
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                delta = load_vector(delta_bufs.index(slot), BLOCK_M, ROW)
                ds = (p * (dp - delta[None, :])).to(dtype)
                ds_buf = ds_bufs.index(ds_slot)
                ds_buf.slice(64 * w, 64, 0).store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(ds_slot), count=1)
                dk = warpgroup_mma(gl.convert_layout(ds, P_LAYOUT), q, dk, is_async=True)
                if TURNS:
                    dv = warpgroup_mma_wait(1, deps=(dv,))
                    mbarrier.arrive(do_empty.index(slot), count=1)
                    dk = warpgroup_mma_wait(0, deps=(dk,))
                    mbarrier.arrive(q_empty.index(slot), count=1)
                    if ds_slot == w:
                        mbarrier.wait(ds_full.index(ds_slot), ds_phase)
                        dq = warpgroup_mma(
                            ds_buf.permute((1, 0)), k_part, dq_zero, use_acc=False, is_async=True
                        )
                        dq = warpgroup_mma_wait(0, deps=(dq,))
                        mbarrier.arrive(ds_empty.index(ds_slot), count=1)
                        gl.atomic_add(sums + block * (BLOCK_M * D) + dq_at, dq, sem="relaxed")
                else:
                    mbarrier.wait(ds_full.index(ds_slot), ds_phase)
                    dq = warpgroup_mma(ds_buf.permute((1, 0)), k_part, dq_zero, use_acc=False, is_async=True)
                    dv = warpgroup_mma_wait(2, deps=(dv,))
                    mbarrier.arrive(do_empty.index(slot), count=1)
                    dk = warpgroup_mma_wait(1, deps=(dk,))
                    mbarrier.arrive(q_empty.index(slot), count=1)
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    mbarrier.arrive(ds_empty.index(ds_slot), count=1)
                    gl.atomic_add(sums + block * (BLOCK_M * D) + dq_at, dq, sem="relaxed")
                it += 1
        # K and V have served, once both halves have: their buffers take dK and dV on the way out.
        mbarrier.arrive(kv_done.index(0), count=1)
        v.store(dv.to(dtype))
        mbarrier.wait(kv_done.index(0), turn & 1)
        k.store((dk * scale).to(dtype))
        fence_async_shared()
        mbarrier.arrive(kv_done.index(1), count=1)
        if w == 0:  # both halves at once: one half alone is not contiguous in the buffer
            mbarrier.wait(kv_done.index(1), turn & 1)
            store_rows(dk_desc, batch, kv_head, start, k_buf)
            store_rows(dv_desc, batch, kv_head, start, v_buf)
            tma.store_wait(0)
            mbarrier.arrive(kv_empty.index(0), count=1)


@gluon.jit
def _compute_0(
    key_descs, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, sizes, sums_ptr, scale, scale_log2,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    _compute(
        0, key_descs, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, sizes, sums_ptr, scale, scale_log2,
        CAUSAL, SECTIONS, BLOCK_M, STAGES, TURNS,
    )  # fmt: skip


@gluon.jit
def _compute_1(
    key_descs, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, sizes, sums_ptr, scale, scale_log2,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    _compute(
        1, key_descs, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, sizes, sums_ptr, scale, scale_log2,
        CAUSAL, SECTIONS, BLOCK_M, STAGES, TURNS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["kv_heads", "group", "seq", "padded", "pairs", "tiles", "section"])
def backward_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_desc, delta_desc, sums_ptr,
    kv_heads, group, seq, padded, pairs, tiles, scale, scale_log2, section,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Boxes of q and do: BLOCK_M rows, of k, v, dk and dv 128. sums: fp32 [batch * heads, padded, D], zero."""
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    key_bufs = (
        gl.allocate_shared_memory(dtype, [128, D], LAYOUT),
        gl.allocate_shared_memory(dtype, [128, D], LAYOUT),
    )
    bufs = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], LAYOUT),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_desc.layout),
    )
    ds_bufs = gl.allocate_shared_memory(dtype, [2, 128, BLOCK_M], LAYOUT)
    key_bars = (barriers(1, 1), barriers(1, 1), barriers(2, 2))
    bars = (barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2))
    ds_bars = (barriers(2, 2), barriers(2, 1 if TURNS else 2))
    key_descs = (k_desc, v_desc, dk_desc, dv_desc)
    descs = (q_desc, do_desc, lse_desc, delta_desc)
    sizes = (kv_heads, group, seq, padded, pairs, tiles, section if SECTIONS else pairs)
    # fmt: off
    gl.warp_specialize([
        (_compute_0, (key_descs, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, sizes, sums_ptr,
                      scale, scale_log2, CAUSAL, SECTIONS, BLOCK_M, STAGES, TURNS)),
        (_compute_1, (key_descs, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, sizes, sums_ptr,
                      scale, scale_log2, CAUSAL, SECTIONS, BLOCK_M, STAGES, TURNS)),
        (_load, (key_descs, descs, key_bars, bars, key_bufs, bufs, sizes, CAUSAL, SECTIONS, BLOCK_M, STAGES)),
    ], [4, 1], [240, 24])
    # fmt: on
