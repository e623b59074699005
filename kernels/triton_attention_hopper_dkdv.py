# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: RUF059, SIM102 - partitions share tuples of arguments; an `if` at compile time is kept apart
"""dK and dV of attention for Hopper in Gluon: no atomics, hence deterministic.

Imports triton: import this module inside functions only.

As in the forward (`triton_attention_hopper`, also on ptxas and the waits) one warp loads and two warpgroups compute,
here 64 keys each, looping over the queries of all heads of the group. They form S^T = K Q^T and dP^T = V dO^T, so that
P^T and dS^T come out as the left operands of the products that follow, in registers: nothing is transposed but views of
shared memory. The two warpgroups keep the matrix units busy for each other; a product left running into the next round
of the loop, ptxas serialises (its C7512).

`prepare_kernel` writes lse in base 2 and delta = rowsum(o do), in rows padded to whole tiles: past seq they hold
+inf and 0, so that P of such rows is 0.
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

from flopcast.kernels.triton_attention_hopper import (
    barriers,
    block_of,
    load_rows,
    pair_of,
    rounds_of,
    store_rows,
    tile_of,
)

KEYS = gl.constexpr(128)  # of a tile, 64 for each warpgroup


@triton.jit
def prepare_kernel(
    o_ptr, do_ptr, lse_ptr, lse2_ptr, delta_ptr, sums_ptr,
    stride_ob, stride_oh, stride_os, stride_dob, stride_doh, stride_dos,
    heads, seq, padded, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """lse2 and delta, fp32 [batch * heads, padded]; clears sums, fp32 [batch * heads, padded, D], unless it is None."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    inside = rows < seq
    at = rows.to(tl.int64)[:, None]
    columns = tl.arange(0, D)[None, :]
    o = tl.load(
        o_ptr + batch * stride_ob + head * stride_oh + at * stride_os + columns, mask=inside[:, None], other=0.0
    )
    do = tl.load(
        do_ptr + batch * stride_dob + head * stride_doh + at * stride_dos + columns, mask=inside[:, None], other=0.0
    )
    lse = tl.load(lse_ptr + row * seq + rows, mask=inside, other=float("inf"))
    written = rows < padded
    tl.store(lse2_ptr + row * padded + rows, lse * 1.4426950408889634, mask=written)
    tl.store(delta_ptr + row * padded + rows, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), mask=written)
    if sums_ptr is not None:
        zeros = tl.zeros([BLOCK_M, D], tl.float32)
        tl.store(sums_ptr + (row * padded + rows.to(tl.int64)[:, None]) * D + columns, zeros, mask=written[:, None])


@gluon.jit
def dkdv_tile(tile, kv_heads, seq, pairs, section, CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Batch, key-value head, first key and first block of queries. Early keys see the most queries, and go first."""
    blocks = gl.cdiv(seq, KEYS)
    start = block_of(tile, pairs, blocks, section, SECTIONS) * KEYS
    pair = pair_of(tile, pairs, blocks, section, SECTIONS)
    first = start // BLOCK_M if CAUSAL else 0
    return pair // kv_heads, pair % kv_heads, start, first


@gluon.jit
def load_vector(buf, LENGTH: gl.constexpr, LAYOUT: gl.constexpr):
    """The fp32 [1, LENGTH] that a buffer holds, as a vector in registers."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return buf._reinterpret(gl.float32, [LENGTH], FLAT).load(LAYOUT)


@gluon.jit
def load_block(descs, bars, bufs, batch, head, row, at, it, STAGES: gl.constexpr):
    """Starts the copies of the block of queries at `at`, the `it`-th of a program; `row`: of lse and delta, the head's
    among those of all batches."""
    q_desc, do_desc, lse_desc, delta_desc = descs
    q_full, q_empty, do_full, do_empty = bars
    q_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    slot = it % STAGES
    phase = (it // STAGES & 1) ^ 1
    mbarrier.wait(q_empty.index(slot), phase)
    mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
    load_rows(q_desc, batch, head, at, q_full.index(slot), q_bufs.index(slot))
    tma.async_copy_global_to_shared(lse_desc, [row, at], q_full.index(slot), lse_bufs.index(slot))
    mbarrier.wait(do_empty.index(slot), phase)
    mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
    load_rows(do_desc, batch, head, at, do_full.index(slot), do_bufs.index(slot))
    tma.async_copy_global_to_shared(delta_desc, [row, at], do_full.index(slot), delta_bufs.index(slot))


@gluon.jit
def _load(
    key_descs, descs, key_bars, bars, key_bufs, bufs, sizes,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_desc, v_desc, _, _ = key_descs
    kv_full, kv_empty = key_bars
    k_bufs, v_bufs = key_bufs
    kv_heads, group, seq, pairs, tiles, section = sizes
    it = 0
    for turn in range(rounds_of(tiles)):
        batch, kv_head, start, first = dkdv_tile(
            tile_of(turn), kv_heads, seq, pairs, section, CAUSAL, SECTIONS, BLOCK_M
        )
        for w in gl.static_range(2):
            mbarrier.wait(kv_empty.index(w), (turn & 1) ^ 1)
            mbarrier.expect(kv_full.index(w), 2 * k_desc.block_type.nbytes)
            load_rows(k_desc, batch, kv_head, start + 64 * w, kv_full.index(w), k_bufs.index(w))
            load_rows(v_desc, batch, kv_head, start + 64 * w, kv_full.index(w), v_bufs.index(w))
        blocks = gl.cdiv(seq, BLOCK_M)
        for member in range(group):
            head = kv_head * group + member
            row = batch * (kv_heads * group) + head
            for block in range(first, blocks):
                load_block(descs, bars, bufs, batch, head, row, block * BLOCK_M, it, STAGES)
                it += 1


@gluon.jit
def _compute(
    w: gl.constexpr, key_descs, key_bars, bars, key_bufs, bufs, sizes, scale, scale_log2,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, SKIP: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_desc, v_desc, dk_desc, dv_desc = key_descs
    kv_full, kv_empty = key_bars
    k_bufs, v_bufs = key_bufs
    q_full, q_empty, do_full, do_empty = bars
    q_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    kv_heads, group, seq, pairs, tiles, section = sizes
    D: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    KEY: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    k = k_bufs.index(w)
    v = v_bufs.index(w)
    zero = gl.zeros([64, BLOCK_M], gl.float32, S_LAYOUT)
    it = 0
    for turn in range(rounds_of(tiles)):
        batch, kv_head, start, first = dkdv_tile(
            tile_of(turn), kv_heads, seq, pairs, section, CAUSAL, SECTIONS, BLOCK_M
        )
        start += 64 * w
        keys = start + gl.arange(0, 64, KEY)
        dk = gl.zeros([64, D], gl.float32, D_LAYOUT)
        dv = gl.zeros([64, D], gl.float32, D_LAYOUT)
        mbarrier.wait(kv_full.index(w), turn & 1)
        for _ in range(group):
            begin = first
            if SKIP:
                if w == 1:  # all of its keys come after the first block of queries
                    slot = it % STAGES
                    mbarrier.wait(q_full.index(slot), it // STAGES & 1)
                    mbarrier.wait(do_full.index(slot), it // STAGES & 1)
                    mbarrier.arrive(do_empty.index(slot), count=1)
                    mbarrier.arrive(q_empty.index(slot), count=1)
                    it += 1
                    begin = first + 1
            for block in range(begin, gl.cdiv(seq, BLOCK_M)):
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
                    if block * BLOCK_M < start + 64:
                        rows = block * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
                        p = gl.where(keys[:, None] <= rows[None, :], p, 0.0)
                p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)
                mbarrier.wait(do_full.index(slot), phase)  # done long ago: keeps the wait below where it is
                dp, p16 = warpgroup_mma_wait(0, deps=(dp, p16))
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                delta = load_vector(delta_bufs.index(slot), BLOCK_M, ROW)
                ds = p * (dp - delta[None, :])
                ds16 = gl.convert_layout(ds.to(dtype), P_LAYOUT)
                dk = warpgroup_mma(ds16, q, dk, is_async=True)
                dv = warpgroup_mma_wait(1, deps=(dv,))
                mbarrier.arrive(do_empty.index(slot), count=1)
                dk = warpgroup_mma_wait(0, deps=(dk,))
                mbarrier.arrive(q_empty.index(slot), count=1)
                it += 1
        # K and V of this tile have served: their buffers take dK and dV on the way out.
        k.store((dk * scale).to(dtype))
        v.store(dv.to(dtype))
        fence_async_shared()
        store_rows(dk_desc, batch, kv_head, start, k)
        store_rows(dv_desc, batch, kv_head, start, v)
        tma.store_wait(0)
        mbarrier.arrive(kv_empty.index(w), count=1)


@gluon.jit
def _compute_0(
    key_descs, key_bars, bars, key_bufs, bufs, sizes, scale, scale_log2,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, SKIP: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _compute(
        0, key_descs, key_bars, bars, key_bufs, bufs, sizes, scale, scale_log2,
        CAUSAL, SECTIONS, SKIP, BLOCK_M, STAGES,
    )  # fmt: skip


@gluon.jit
def _compute_1(
    key_descs, key_bars, bars, key_bufs, bufs, sizes, scale, scale_log2,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, SKIP: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _compute(
        1, key_descs, key_bars, bars, key_bufs, bufs, sizes, scale, scale_log2,
        CAUSAL, SECTIONS, SKIP, BLOCK_M, STAGES,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["kv_heads", "group", "seq", "pairs", "tiles", "section"])
def dkdv_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_desc, delta_desc,
    kv_heads, group, seq, pairs, tiles, scale, scale_log2, section,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, SKIP: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Boxes of q and do: BLOCK_M rows, of the others 64; of lse (base 2) and delta: BLOCK_M elements.

    SKIP (causal, BLOCK_M 64): the second warpgroup does not compute the first block of queries, none of which sees its
    keys.
    """
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    key_bufs = (
        gl.allocate_shared_memory(dtype, [2, 64, D], LAYOUT),
        gl.allocate_shared_memory(dtype, [2, 64, D], LAYOUT),
    )
    bufs = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], LAYOUT),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_desc.layout),
    )
    key_bars = (barriers(2, 1), barriers(2, 1))
    bars = (barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2))
    key_descs = (k_desc, v_desc, dk_desc, dv_desc)
    descs = (q_desc, do_desc, lse_desc, delta_desc)
    sizes = (kv_heads, group, seq, pairs, tiles, section if SECTIONS else pairs)
    # fmt: off
    gl.warp_specialize([
        (_compute_0, (key_descs, key_bars, bars, key_bufs, bufs, sizes, scale, scale_log2,
                      CAUSAL, SECTIONS, SKIP, BLOCK_M, STAGES)),
        (_compute_1, (key_descs, key_bars, bars, key_bufs, bufs, sizes, scale, scale_log2,
                      CAUSAL, SECTIONS, SKIP, BLOCK_M, STAGES)),
        (_load, (key_descs, descs, key_bars, bars, key_bufs, bufs, sizes, CAUSAL, SECTIONS, BLOCK_M, STAGES)),
    ], [4, 1], [240, 24])
    # fmt: on
