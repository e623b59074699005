# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: RUF059, SIM102 - partitions share tuples of arguments; an `if` at compile time is kept apart
"""The backward of attention for Hopper in one pass, in Gluon: five products, where two kernels make seven.

Imports triton: import this module inside functions only.

The kernel of dK and dV (`triton_attention_hopper_dkdv`), whose two warpgroups also leave dS^T in shared memory, where
in turns one of them multiplies that of all 128 keys with K. What these keys add to dQ goes through shared memory in
fp32: from there the tensor-memory unit adds it to `sums` in L2, and no thread waits for it, as in FlashAttention-3
(Shah et al. 2024). With additions by the threads themselves it was slower than the two kernels at every length. Their
order differs from run to run, and so do the last bits of dQ. `dq_scale_kernel` then writes dQ.

Programs take tiles by a schedule (`attention_schedule`). All of a pair's walk through the queries in one order, from
the last block to the diagonal and in each block through the heads of the group, so that they read and add to the same
rows at about the same time: otherwise these leave L2 before the next program comes, where groups are large (14 query
heads of 2 key-value heads, 2,048 tokens: 0.92 of cuDNN's speed for 1.04).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flopcast.kernels.triton_attention_hopper import barriers, load_rows, store_rows
from flopcast.kernels.triton_attention_hopper_dkdv import KEYS, load_block, load_vector


@builtin
def add_to_memory(desc, coord, buf, _semantic=None):
    """Starts the addition of a buffer to the box of a descriptor at `coord`, as `tma.async_copy_shared_to_global` does
    the copy: Triton 3.6 and 3.7 have it below Gluon's language, not in it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, buf.handle)


@triton.jit
def dq_scale_kernel(
    sums_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqs, heads, seq, padded, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dq = scale * sums, of fp32 [batch * heads, padded, D]."""
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, D)[None, :]
    sums = tl.load(sums_ptr + (row * padded + rows) * D + columns, mask=rows < seq, other=0.0)
    out = dq_ptr + row // heads * stride_dqb + row % heads * stride_dqh + rows * stride_dqs + columns
    tl.store(out, (sums * scale).to(dq_ptr.dtype.element_ty), mask=rows < seq)


@gluon.jit
def turns_of(schedule_ptr):
    """Where this program's tiles begin in the schedule, and how many they are."""
    begin = gl.load(schedule_ptr + gl.program_id(0))
    return begin, gl.load(schedule_ptr + gl.program_id(0) + 1) - begin


@gluon.jit
def located(schedule_ptr, place, kv_heads, seq, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr):
    """Batch, key-value head, first key and first block of queries of the tile at a place of the schedule."""
    tile = gl.load(schedule_ptr + place)
    blocks = gl.cdiv(seq, KEYS)
    start = tile % blocks * KEYS
    pair = tile // blocks
    first = start // BLOCK_M if CAUSAL else 0
    return pair // kv_heads, pair % kv_heads, start, first


@gluon.jit
def next_of(member, block, group):
    """The head of the group and the block of queries that come after these."""
    member += 1
    block -= (member == group).to(gl.int32)
    return gl.where(member == group, 0, member), block


@gluon.jit
def _load(
    key_descs, descs, key_bars, bars, key_bufs, bufs, sizes, schedule_ptr,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_desc, v_desc, dk_desc, dv_desc = key_descs
    kv_full, kv_empty, kv_done = key_bars
    k_buf, v_buf = key_bufs
    kv_heads, group, seq, padded = sizes
    begin, count = turns_of(schedule_ptr)
    it = 0
    for turn in range(count):
        batch, kv_head, start, first = located(schedule_ptr, begin + turn, kv_heads, seq, CAUSAL, BLOCK_M)
        mbarrier.wait(kv_empty.index(0), (turn & 1) ^ 1)
        mbarrier.expect(kv_full.index(0), 2 * k_desc.block_type.nbytes)
        load_rows(k_desc, batch, kv_head, start, kv_full.index(0), k_buf)
        load_rows(v_desc, batch, kv_head, start, kv_full.index(0), v_buf)
        blocks = gl.cdiv(seq, BLOCK_M)
        member = 0
        block = blocks - 1
        for _ in range(group * (blocks - first)):
            head = kv_head * group + member
            row = batch * (kv_heads * group) + head
            load_block(descs, bars, bufs, batch, head, row, block * BLOCK_M, it, STAGES)
            it += 1
            member, block = next_of(member, block, group)


@gluon.jit
def _add(ds_bars, ds_bufs, k_buf, dq_buf, sums_desc, row, it):
    """Adds what these keys make of dQ to `sums`, at a row of it: the product of dS of all keys and K."""
    ds_full, ds_empty = ds_bars
    M: gl.constexpr = dq_buf.shape[0]
    D: gl.constexpr = dq_buf.shape[1]
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    mbarrier.wait(ds_full.index(it % 2), it // 2 & 1)
    dq = gl.zeros([M, D], gl.float32, DQ_LAYOUT)
    dq = warpgroup_mma(ds_bufs.index(it % 2).permute((1, 0)), k_buf, dq, use_acc=False, is_async=True)
    tma.store_wait(0)  # the addition before has left the buffer
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(ds_empty.index(it % 2), count=1)
    dq_buf.store(dq)
    fence_async_shared()
    add_to_memory(sums_desc, [row, 0], dq_buf)


@gluon.jit
def _compute(
    w: gl.constexpr, key_descs, sums_desc, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, dq_bufs, sizes,
    schedule_ptr, scale, scale_log2, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_desc, v_desc, dk_desc, dv_desc = key_descs
    kv_full, kv_empty, kv_done = key_bars
    q_full, q_empty, do_full, do_empty = bars
    ds_full, ds_empty = ds_bars
    k_buf, v_buf = key_bufs
    q_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    kv_heads, group, seq, padded = sizes
    begin, count = turns_of(schedule_ptr)
    D: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    KEY: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    k = k_buf.slice(64 * w, 64, 0)
    v = v_buf.slice(64 * w, 64, 0)
    dq_buf = dq_bufs.index(w)
    zero = gl.zeros([64, BLOCK_M], gl.float32, S_LAYOUT)
    it = 0
    for turn in range(count):
        batch, kv_head, start, first = located(schedule_ptr, begin + turn, kv_heads, seq, CAUSAL, BLOCK_M)
        keys = start + 64 * w + gl.arange(0, 64, KEY)
        dk = gl.zeros([64, D], gl.float32, D_LAYOUT)
        dv = gl.zeros([64, D], gl.float32, D_LAYOUT)
        mbarrier.wait(kv_full.index(0), turn & 1)
        blocks = gl.cdiv(seq, BLOCK_M)
        member = 0
        block = blocks - 1
        for _ in range(group * (blocks - first)):
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
            mbarrier.wait(ds_empty.index(it % 2), (it // 2 & 1) ^ 1)  # also keeps the next wait below the softmax
            dp, p16 = warpgroup_mma_wait(0, deps=(dp, p16))
            dv = warpgroup_mma(p16, do, dv, is_async=True)
            delta = load_vector(delta_bufs.index(slot), BLOCK_M, ROW)
            ds = (p * (dp - delta[None, :])).to(dtype)
            ds_bufs.index(it % 2).slice(64 * w, 64, 0).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(it % 2), count=1)
            dk = warpgroup_mma(gl.convert_layout(ds, P_LAYOUT), q, dk, is_async=True)
            dv = warpgroup_mma_wait(1, deps=(dv,))
            mbarrier.arrive(do_empty.index(slot), count=1)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(q_empty.index(slot), count=1)
            if it % 2 == w:
                row = (batch * (kv_heads * group) + kv_head * group + member) * padded + block * BLOCK_M
                _add(ds_bars, ds_bufs, k_buf, dq_buf, sums_desc, row, it)
            it += 1
            member, block = next_of(member, block, group)
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
    tma.store_wait(0)


@gluon.jit
def _compute_0(
    key_descs, sums_desc, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, dq_bufs, sizes, schedule_ptr,
    scale, scale_log2, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _compute(
        0, key_descs, sums_desc, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, dq_bufs, sizes, schedule_ptr,
        scale, scale_log2, CAUSAL, BLOCK_M, STAGES,
    )  # fmt: skip


@gluon.jit
def _compute_1(
    key_descs, sums_desc, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, dq_bufs, sizes, schedule_ptr,
    scale, scale_log2, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _compute(
        1, key_descs, sums_desc, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, dq_bufs, sizes, schedule_ptr,
        scale, scale_log2, CAUSAL, BLOCK_M, STAGES,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["kv_heads", "group", "seq", "padded"])
def onepass_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_desc, delta_desc, sums_desc,
    schedule_ptr, kv_heads, group, seq, padded, scale, scale_log2,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Boxes of q, do and sums: BLOCK_M rows, of k, v, dk and dv 128; of lse (base 2) and delta: BLOCK_M elements. sums:
    fp32 [batch * heads * padded, D], zero. schedule_ptr: int32, at i where the tiles of program i begin, then these."""
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    key_bufs = (
        gl.allocate_shared_memory(dtype, [KEYS, D], LAYOUT),
        gl.allocate_shared_memory(dtype, [KEYS, D], LAYOUT),
    )
    bufs = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], LAYOUT),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_desc.layout),
    )
    ds_bufs = gl.allocate_shared_memory(dtype, [2, KEYS, BLOCK_M], LAYOUT)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, D], sums_desc.layout)
    key_bars = (barriers(1, 1), barriers(1, 1), barriers(2, 2))
    bars = (barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2))
    ds_bars = (barriers(2, 2), barriers(2, 1))
    key_descs = (k_desc, v_desc, dk_desc, dv_desc)
    descs = (q_desc, do_desc, lse_desc, delta_desc)
    sizes = (kv_heads, group, seq, padded)
    # fmt: off
    gl.warp_specialize([
        (_compute_0, (key_descs, sums_desc, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, dq_bufs, sizes,
                      schedule_ptr, scale, scale_log2, CAUSAL, BLOCK_M, STAGES)),
        (_compute_1, (key_descs, sums_desc, key_bars, bars, ds_bars, key_bufs, bufs, ds_bufs, dq_bufs, sizes,
                      schedule_ptr, scale, scale_log2, CAUSAL, BLOCK_M, STAGES)),
        (_load, (key_descs, descs, key_bars, bars, key_bufs, bufs, sizes, schedule_ptr, CAUSAL, BLOCK_M, STAGES)),
    ], [4, 1], [240, 24])
    # fmt: on
