# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: RUF059 - partitions share tuples of arguments; an `if` at compile time is kept apart
"""dQ of attention for Hopper in Gluon: no atomics, hence deterministic.

Imports triton: import this module inside functions only.

One warp loads and two warpgroups compute, 64 query rows each, looping over the keys; see `triton_attention_hopper`,
also on ptxas and the waits, and `triton_attention_hopper_dkdv`, whose `prepare_kernel` makes lse and delta. With DELTA
this kernel makes both on its way, for itself and for dK and dV, which come after it: of O, loaded with Q and dO, and of
the natural lse. That saves one read of dO and one kernel, 7% of a backward of 1,024 tokens.
"""

from __future__ import annotations

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

ROWS = gl.constexpr(128)  # of a tile, 64 for each warpgroup


@gluon.jit
def _locate(tile, sizes, CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Batch, head, first row and number of key blocks of a tile."""
    heads, _, seq, _, pairs, blocks, section = sizes
    block = block_of(tile, pairs, blocks, section, SECTIONS)
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    start = block * ROWS
    pair = pair_of(tile, pairs, blocks, section, SECTIONS)
    batch = pair // heads
    head = pair % heads
    last = gl.minimum(start + ROWS, seq) if CAUSAL else seq
    return batch, head, start, gl.cdiv(last, BLOCK_N)


@gluon.jit
def _load(
    descs, bars, bufs, sizes,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, DELTA: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, do_desc, k_desc, v_desc, _, o_desc = descs
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_bufs, do_bufs, k_bufs, v_bufs, o_bufs = bufs
    heads, group, seq, _, pairs, blocks, _ = sizes
    it = 0
    for turn in range(rounds_of(pairs * blocks)):
        batch, head, start, count = _locate(tile_of(turn), sizes, CAUSAL, SECTIONS, BLOCK_N)
        kv_head = head // group
        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(w), (3 if DELTA else 2) * q_desc.block_type.nbytes)
            load_rows(q_desc, batch, head, start + 64 * w, q_full.index(w), q_bufs.index(w))
            load_rows(do_desc, batch, head, start + 64 * w, q_full.index(w), do_bufs.index(w))
            if DELTA:
                load_rows(o_desc, batch, head, start + 64 * w, q_full.index(w), o_bufs.index(w))
        for j in range(count):
            at = (count - 1 - j) * BLOCK_N
            slot = it % STAGES
            phase = (it // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            load_rows(k_desc, batch, kv_head, at, k_full.index(slot), k_bufs.index(slot))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            load_rows(v_desc, batch, kv_head, at, v_full.index(slot), v_bufs.index(slot))
            it += 1


@gluon.jit
def _compute(
    w: gl.constexpr, descs, bars, bufs, sizes, lse_ptr, delta_ptr, natural_ptr, scale, scale_log2,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, DELTA: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, _, _, _, dq_desc, _ = descs
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_bufs, do_bufs, k_bufs, v_bufs, o_bufs = bufs
    heads, group, seq, padded, pairs, blocks, _ = sizes
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    q = q_bufs.index(w)
    do = do_bufs.index(w)
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    it = 0
    for turn in range(rounds_of(pairs * blocks)):
        batch, head, start, count = _locate(tile_of(turn), sizes, CAUSAL, SECTIONS, BLOCK_N)
        start += 64 * w
        rows = start + gl.arange(0, 64, ROW)
        base = (batch * heads + head).to(gl.int64) * padded
        if DELTA:
            of_head = (batch * heads + head).to(gl.int64) * seq
            lse = gl.load(natural_ptr + of_head + rows, mask=rows < seq, other=float("inf")) * 1.4426950408889634
            mbarrier.wait(q_full.index(w), turn & 1)
            products = o_bufs.index(w).load(D_LAYOUT).to(gl.float32) * do.load(D_LAYOUT).to(gl.float32)
            delta = gl.convert_layout(gl.sum(products, 1), ROW)
            gl.store(lse_ptr + base + rows, lse)
            gl.store(delta_ptr + base + rows, delta)
            dq = gl.zeros([64, D], gl.float32, D_LAYOUT)
        else:
            lse = gl.load(lse_ptr + base + rows)  # padded to whole tiles: no mask
            delta = gl.load(delta_ptr + base + rows)
            dq = gl.zeros([64, D], gl.float32, D_LAYOUT)
            mbarrier.wait(q_full.index(w), turn & 1)
        for j in range(count):
            slot = it % STAGES
            phase = it // STAGES & 1
            k = k_bufs.index(slot)
            v = v_bufs.index(slot)
            at = (count - 1 - j) * BLOCK_N
            mbarrier.wait(k_full.index(slot), phase)
            s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(slot), phase)
            dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            p = gl.exp2(s * scale_log2 - lse[:, None])
            if CAUSAL:
                if at + BLOCK_N > start:
                    cols = at + gl.arange(0, BLOCK_N, COLUMN)
                    p = gl.where(cols[None, :] <= rows[:, None], p, 0.0)
            else:
                if at + BLOCK_N > seq:
                    cols = at + gl.arange(0, BLOCK_N, COLUMN)
                    p = gl.where((cols < seq)[None, :], p, 0.0)
            mbarrier.wait(k_full.index(slot), phase)  # done long ago: keeps the wait below where it is
            dp, p = warpgroup_mma_wait(0, deps=(dp, p))
            mbarrier.arrive(v_empty.index(slot), count=1)
            ds = p * (dp - delta[:, None])
            ds16 = gl.convert_layout(ds.to(dtype), P_LAYOUT)
            dq = warpgroup_mma(ds16, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            it += 1
        q.store((dq * scale).to(dtype))  # Q has served: its buffer takes dQ on the way out
        fence_async_shared()
        store_rows(dq_desc, batch, head, start, q)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(w), count=1)


@gluon.jit
def _compute_0(
    descs, bars, bufs, sizes, lse_ptr, delta_ptr, natural_ptr, scale, scale_log2,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, DELTA: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _compute(
        0, descs, bars, bufs, sizes, lse_ptr, delta_ptr, natural_ptr, scale, scale_log2,
        CAUSAL, SECTIONS, DELTA, BLOCK_N, STAGES,
    )  # fmt: skip


@gluon.jit
def _compute_1(
    descs, bars, bufs, sizes, lse_ptr, delta_ptr, natural_ptr, scale, scale_log2,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, DELTA: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _compute(
        1, descs, bars, bufs, sizes, lse_ptr, delta_ptr, natural_ptr, scale, scale_log2,
        CAUSAL, SECTIONS, DELTA, BLOCK_N, STAGES,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["heads", "group", "seq", "padded", "pairs", "blocks", "section"])
def dq_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, o_desc, lse_ptr, delta_ptr, natural_ptr,
    heads, group, seq, padded, pairs, blocks, scale, scale_log2, section,
    CAUSAL: gl.constexpr, SECTIONS: gl.constexpr, DELTA: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Boxes of k and v: BLOCK_N rows, of the others 64. lse (base 2) and delta: fp32 [batch * heads, padded]; written
    with DELTA, which takes o and the natural lse [batch * heads, seq] (None without)."""
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_bufs = gl.allocate_shared_memory(dtype, [2, 64, D], LAYOUT)
    do_bufs = gl.allocate_shared_memory(dtype, [2, 64, D], LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], LAYOUT)
    o_bufs = do_bufs
    source_desc = do_desc
    source_ptr = lse_ptr
    if DELTA:
        o_bufs = gl.allocate_shared_memory(dtype, [2, 64, D], LAYOUT)
        source_desc = o_desc
        source_ptr = natural_ptr
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, o_bufs)
    bars = (
        barriers(2, 1), barriers(2, 1),
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2),
    )  # fmt: skip
    descs = (q_desc, do_desc, k_desc, v_desc, dq_desc, source_desc)
    sizes = (heads, group, seq, padded, pairs, blocks, section if SECTIONS else pairs)
    # fmt: off
    gl.warp_specialize([
        (_compute_0, (descs, bars, bufs, sizes, lse_ptr, delta_ptr, source_ptr, scale, scale_log2,
                      CAUSAL, SECTIONS, DELTA, BLOCK_N, STAGES)),
        (_compute_1, (descs, bars, bufs, sizes, lse_ptr, delta_ptr, source_ptr, scale, scale_log2,
                      CAUSAL, SECTIONS, DELTA, BLOCK_N, STAGES)),
        (_load, (descs, bars, bufs, sizes, CAUSAL, SECTIONS, DELTA, BLOCK_N, STAGES)),
    ], [4, 1], [240, 24])
    # fmt: on
