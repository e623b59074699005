# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

"""Attention's forward for Hopper in Gluon, Triton's lower level: one warp loads, two warpgroups compute.

Imports triton: import this module inside functions only.

Each of the two computing warpgroups holds 64 query rows; together they share every block of keys and values that the
loading warp copies with TMA. A warpgroup issues the next S = Q K^T before O += P V of the block before, and makes the
softmax of the first while the second still runs (the schedule of FlashAttention-3: Shah et al. 2024). With PINGPONG
they also take turns at the matrix units, so that one computes exponentials while the other multiplies.
With PACK they take the same 64 rows of two query heads of one group instead of 128 rows of one head: the same keys,
and a diagonal half as thick. Only the first block of keys is masked: BLOCK_N is at least the rows of a tile.

Programs are persistent, and take tiles to and fro: the one that got the longest of a round gets the shortest of the
next. Tiles are numbered longest first; with SECTIONS section by section, as many heads as keep their keys and values in
L2 (not measured yet: below 1024 tokens all heads at once read them from memory for each block of rows).

What ptxas does to such code decides the speed. It moves a wait for the matrix units up across arithmetic, which undoes
the overlap, but not across a branch: each such wait stands behind the wait for a memory barrier.
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

WG = gl.constexpr(2)  # warpgroups that compute


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N memory barriers, each of COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def load_rows(desc, batch, head, row, full, buf):
    """Starts the copy of one box of rows into a buffer [rows, head_dim]; `full` counts its bytes."""
    box = buf._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full, box)


@gluon.jit
def store_rows(desc, batch, head, row, buf):
    """Starts the copy of a buffer [rows, head_dim] to memory; rows past seq stay unwritten."""
    box = buf._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    tma.async_copy_shared_to_global(desc, [batch, head, row, 0], box)


@gluon.jit
def rounds_of(total):
    """How many tiles this program takes of those that `tile_of` deals out to and fro."""
    whole = total // gl.num_programs(0)
    left = total - whole * gl.num_programs(0)
    place = gl.program_id(0)
    if whole % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return gl.where(place < left, whole + 1, whole)


@gluon.jit
def tile_of(turn):
    """The tile of a program's turn: rising with the program in even turns, falling in odd ones."""
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return turn * gl.num_programs(0) + place


@gluon.jit
def block_of(tile, pairs, blocks, section, SECTIONS: gl.constexpr):
    """The block of rows of a tile, one of `blocks` per (batch, head) pair, of which there are `pairs`. With SECTIONS
    `section` pairs are processed at a time, else all are."""
    if SECTIONS:
        width = gl.minimum(section, pairs - tile // (section * blocks) * section)
        block = tile % (section * blocks) // width
    else:
        block = tile // pairs
    return block


@gluon.jit
def pair_of(tile, pairs, blocks, section, SECTIONS: gl.constexpr):
    """The (batch, head) pair of a tile; see `block_of`."""
    if SECTIONS:
        first = tile // (section * blocks) * section
        pair = first + tile % (section * blocks) % gl.minimum(section, pairs - first)
    else:
        pair = tile % pairs
    return pair


@gluon.jit
def _locate(tile, sizes, CAUSAL: gl.constexpr, PACK: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Batch, first head, first row and number of key blocks of a tile."""
    heads, _, seq, pairs, blocks, section = sizes
    block = block_of(tile, pairs, blocks, section, SECTIONS)
    pair = pair_of(tile, pairs, blocks, section, SECTIONS)
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    step: gl.constexpr = WG if PACK else 1
    units = heads // step
    batch = pair // units
    head = pair % units * step
    rows: gl.constexpr = 64 if PACK else 64 * WG
    start = block * rows
    last = gl.minimum(start + rows, seq) if CAUSAL else seq
    return batch, head, start, gl.cdiv(last, BLOCK_N)


@gluon.jit
def _load(
    descs, bars, bufs, sizes,
    CAUSAL: gl.constexpr, PACK: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, _ = descs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
    q_bufs, k_bufs, v_bufs, _ = bufs
    _, group, _, pairs, blocks, _ = sizes
    it = 0
    for turn in range(rounds_of(pairs * blocks)):
        batch, head, start, count = _locate(tile_of(turn), sizes, CAUSAL, PACK, SECTIONS, BLOCK_N)
        for w in gl.static_range(WG):
            mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
            if PACK:
                load_rows(q_desc, batch, head + w, start, q_full.index(w), q_bufs.index(w))
            else:
                load_rows(q_desc, batch, head, start + 64 * w, q_full.index(w), q_bufs.index(w))
        for j in range(count):
            at = (count - 1 - j) * BLOCK_N  # the diagonal first: the one block that needs a mask
            slot = it % STAGES
            phase = (it // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            load_rows(k_desc, batch, head // group, at, k_full.index(slot), k_bufs.index(slot))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            load_rows(v_desc, batch, head // group, at, v_full.index(slot), v_bufs.index(slot))
            it += 1


@gluon.jit
def _softmax(s, row_max, scale_log2):
    """(P, new maximum of the raw scores, what earlier sums shrink by). Of a row of -inf only, so far, P is 0."""
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, new_max, gl.exp2(row_max * scale_log2 - shift)


@gluon.jit
def _compute(
    w: gl.constexpr, descs, bars, bufs, sizes, lse_ptr, scale_log2,
    CAUSAL: gl.constexpr, PACK: gl.constexpr, PINGPONG: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    _, _, _, o_desc = descs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = bars
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    heads, _, seq, pairs, blocks, _ = sizes
    D: gl.constexpr = o_desc.block_type.shape[3]
    dtype: gl.constexpr = o_desc.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q = q_bufs.index(w)
    o_buf = o_bufs.index(w)
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    it = 0
    served = 0  # turns taken at the matrix units
    for turn in range(rounds_of(pairs * blocks)):
        batch, head, start, count = _locate(tile_of(turn), sizes, CAUSAL, PACK, SECTIONS, BLOCK_N)
        if PACK:
            head += w
        else:
            start += 64 * w
        slot = it % STAGES
        mbarrier.wait(q_full.index(w), turn & 1)
        mbarrier.wait(k_full.index(slot), it // STAGES & 1)
        s = warpgroup_mma(q, k_bufs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        rows = start + gl.arange(0, 64, ROW)
        columns = (count - 1) * BLOCK_N + gl.arange(0, BLOCK_N, COLUMN)
        if CAUSAL:
            s = gl.where(columns[None, :] <= rows[:, None], s, float("-inf"))
        else:
            s = gl.where((columns < seq)[None, :], s, float("-inf"))
        p32, row_max, shrink = _softmax(s, gl.full([64], float("-inf"), gl.float32, ROW), scale_log2)
        row_sum = gl.sum(p32, 1)
        p = gl.convert_layout(p32.to(dtype), P_LAYOUT)
        o = gl.zeros([64, D], gl.float32, O_LAYOUT)
        mbarrier.wait(k_full.index((it + 1) % STAGES), (it + 1) // STAGES & 1, pred=count > 1)
        for j in range(1, count):
            v_slot = it % STAGES
            v_phase = it // STAGES & 1
            it += 1
            slot = it % STAGES
            if PINGPONG:
                mbarrier.wait(turns.index(w), (served & 1) ^ (1 if w == 0 else 0))
            s = warpgroup_mma(q, k_bufs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_slot), v_phase)
            o = warpgroup_mma(p, v_bufs.index(v_slot), o, is_async=True)
            if PINGPONG:
                mbarrier.arrive(turns.index((w + 1) % WG), count=1)
                served += 1
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            p32, row_max, shrink = _softmax(s, row_max, scale_log2)
            row_sum = row_sum * shrink + gl.sum(p32, 1)
            p = gl.convert_layout(p32.to(dtype), P_LAYOUT)
            # The keys of the next block; and a branch, which keeps the wait for P V behind the softmax.
            mbarrier.wait(k_full.index((it + 1) % STAGES), (it + 1) // STAGES & 1, pred=j + 1 < count)
            o, p, row_sum = warpgroup_mma_wait(0, deps=(o, p, row_sum))
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            o = o * gl.convert_layout(shrink, O_ROW)[:, None]
        mbarrier.arrive(q_empty.index(w), count=1)
        slot = it % STAGES
        mbarrier.wait(v_full.index(slot), it // STAGES & 1)
        o = warpgroup_mma(p, v_bufs.index(slot), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(v_empty.index(slot), count=1)
        it += 1
        o = o / gl.convert_layout(row_sum, O_ROW)[:, None]
        tma.store_wait(0)  # the tile before has left the buffer
        o_buf.store(o.to(dtype))
        fence_async_shared()
        store_rows(o_desc, batch, head, start, o_buf)
        lse = row_max * (scale_log2 * 0.6931471805599453) + gl.log(row_sum)
        gl.store(lse_ptr + (batch * heads + head).to(gl.int64) * seq + rows, lse, mask=rows < seq)
    tma.store_wait(0)


@gluon.jit
def _compute_0(
    descs, bars, bufs, sizes, lse_ptr, scale_log2, CAUSAL: gl.constexpr, PACK: gl.constexpr,
    PINGPONG: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _compute(0, descs, bars, bufs, sizes, lse_ptr, scale_log2, CAUSAL, PACK, PINGPONG, SECTIONS, BLOCK_N, STAGES)


@gluon.jit
def _compute_1(
    descs, bars, bufs, sizes, lse_ptr, scale_log2, CAUSAL: gl.constexpr, PACK: gl.constexpr,
    PINGPONG: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _compute(1, descs, bars, bufs, sizes, lse_ptr, scale_log2, CAUSAL, PACK, PINGPONG, SECTIONS, BLOCK_N, STAGES)


# No value of a size compiles a kernel of its own: one configuration, one kernel.
@gluon.jit(do_not_specialize=["heads", "group", "seq", "pairs", "blocks", "section"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, heads, group, seq, pairs, blocks, scale_log2, section,
    CAUSAL: gl.constexpr, PACK: gl.constexpr, PINGPONG: gl.constexpr, SECTIONS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Writes o and lse (natural, fp32 [batch, heads, seq]). Boxes of q and o: 64 rows, of k and v: BLOCK_N."""
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_bufs = gl.allocate_shared_memory(dtype, [WG, 64, D], LAYOUT)
    o_bufs = gl.allocate_shared_memory(dtype, [WG, 64, D], LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], LAYOUT)
    bars = (
        barriers(WG, 1), barriers(WG, 1), barriers(STAGES, 1), barriers(STAGES, WG), barriers(STAGES, 1),
        barriers(STAGES, WG), barriers(WG, 1),
    )  # fmt: skip
    descs = (q_desc, k_desc, v_desc, o_desc)
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs)
    sizes = (heads, group, seq, pairs, blocks, section if SECTIONS else pairs)
    # fmt: off
    gl.warp_specialize([
        (_compute_0, (descs, bars, bufs, sizes, lse_ptr, scale_log2,
                      CAUSAL, PACK, PINGPONG, SECTIONS, BLOCK_N, STAGES)),
        (_compute_1, (descs, bars, bufs, sizes, lse_ptr, scale_log2,
                      CAUSAL, PACK, PINGPONG, SECTIONS, BLOCK_N, STAGES)),
        (_load, (descs, bars, bufs, sizes, CAUSAL, PACK, SECTIONS, BLOCK_N, STAGES)),
    ], [4, 1], [240, 24])
    # fmt: on
