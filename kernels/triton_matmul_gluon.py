# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Matmul for Hopper in Gluon, Triton's lower level: one warp loads, two or three warpgroups multiply.

Imports triton: import this module inside functions only. Whole tiles of 16-bit A, B and C with rows of whole 16 bytes.

The loading warp fills a ring of k steps of A and B, tile after tile, and is ahead of the products by the ring's length,
epilogues included. Two ways to share the tiles among the warpgroups:
- together: a tile is GROUPS x ROWS rows, each group multiplies its ROWS, and goes on alone. With DRIFT a group begins
  that many steps of k after the one before it; the distance stays, and one's epilogue meets another's last products;
- in turns (TURNS): a tile is ROWS rows, and two groups take the program's tiles alternately. While one stores, the
  other multiplies. A group waits for its turn: a barrier of the ring is told by one bit which round it is in, and only
  who is less than a round behind may ask it.

With A_REGS a group copies its rows of A from shared memory into registers, once for all columns, while another's
products run. From shared memory an instruction fetches them for each block of columns again.

A tile has N1 + N2 columns, powers of two, N2 possibly 0, in an accumulator each: tiles of 192, 160, 144 or 96 columns,
and of 192 rows in three groups, fill waves that 128 x 256 leaves a quarter empty.

Split, a tile is as many programs' work as k has parts. Each writes its part, in fp32, to a workspace of whole results,
which a second kernel sums in the order of k: results are the same from run to run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flopcast.kernels.launching import launch as launch_kernel
from flopcast.kernels.matmul_configs import STREAM, blocks
from flopcast.kernels.triton_matmul_tma import AHEAD, PDL, after_the_kernel_before, suits

# Registers per thread by the number of warpgroups: at launch, then of threads that multiply and of threads that load.
# Each register file of 16,384 serves GROUPS + 1 warps, the loading warp's three idle neighbours included.
REGISTERS = {2: (168, 240, 24), 3: (128, 160, 32)}


@gluon.jit
def _position(tile, tiles_m, tiles_n, group_m):
    """(row, column) of a tile; as `triton_matmul_tma.tile_position`."""
    in_group = group_m * tiles_n
    first = tile // in_group * group_m
    rows = gl.minimum(tiles_m - first, group_m)
    return first + tile % in_group % rows, tile % in_group // rows


@gluon.jit
def _steps(item, tiles, split, k_tiles, SPLIT: gl.constexpr):
    """(tile, its part of k, first step, step after the last) of a program's item of work, part after part: programs
    that run at once read the same of k."""
    tile = item
    part = item * 0
    first = part
    last = k_tiles
    if SPLIT:
        part = item // tiles
        tile = item % tiles
        first = part * k_tiles // split
        last = (part + 1) * k_tiles // split
    return tile, part, first, last


@gluon.jit
def _load_a(desc, row, k, full, buf, TRANS: gl.constexpr):
    if TRANS:
        tma.async_copy_global_to_shared(desc, [k, row], full, buf)
    else:
        tma.async_copy_global_to_shared(desc, [row, k], full, buf)


@gluon.jit
def _load_b(desc, k, column, full, buf, TRANS: gl.constexpr):
    if TRANS:
        tma.async_copy_global_to_shared(desc, [column, k], full, buf)
    else:
        tma.async_copy_global_to_shared(desc, [k, column], full, buf)


@gluon.jit
def _load(
    descs, bufs, bars, sizes,
    GROUPS: gl.constexpr, TURNS: gl.constexpr, ROWS: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, SPLIT: gl.constexpr,
    AHEAD_OF: gl.constexpr,
):  # fmt: skip
    """The loading warp: copies every k step of every tile of this program into the ring."""
    if AHEAD_OF:
        gdc_wait()  # all that this kernel reads and writes comes after its first load
    a_desc, b_desc, more_desc, _, _ = descs
    a_ring, b_ring, more_ring, _ = bufs
    full, empty, _ = bars
    tiles_m, tiles_n, k_tiles, group_m, split = sizes
    PARTS: gl.constexpr = 1 if TURNS else GROUPS
    BYTES: gl.constexpr = (PARTS * ROWS + N1 + N2) * BLOCK_K * 2
    step = 0
    tiles = tiles_m * tiles_n
    items = tiles * split if SPLIT else tiles
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, _part, first, last = _steps(item, tiles, split, k_tiles, SPLIT)
        pid_m, pid_n = _position(tile, tiles_m, tiles_n, group_m)
        row = pid_m * (PARTS * ROWS)
        column = pid_n * (N1 + N2)
        for ki in range(first, last):
            stage = step % STAGES
            # in the first round the ring is free: a new barrier counts the phase before its first as done
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            k = ki * BLOCK_K
            for w in gl.static_range(PARTS):
                _load_a(a_desc, row + w * ROWS, k, bar, a_ring.index(stage * PARTS + w), TRANS_A)
            _load_b(b_desc, k, column, bar, b_ring.index(stage), TRANS_B)
            if N2:
                _load_b(more_desc, k, column + N1, bar, more_ring.index(stage), TRANS_B)
            step += 1


@gluon.jit
def _send(desc, row, column, c, buf, LAYOUT: gl.constexpr):
    """Starts the copy of a block to memory, through a buffer that an earlier copy may still be reading."""
    part = gl.convert_layout(c.to(desc.dtype), LAYOUT)
    tma.store_wait(0)
    out = buf._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    out.store(part)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], out)


@gluon.jit
def _keep(part_ptr, row, column, c, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Writes a block of a part of k to its workspace, whole tiles without a mask: four threads fill a sector."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    gl.store(part_ptr + (rows * stride)[:, None] + columns[None, :], c)


@gluon.jit
def _multiply(
    w: gl.constexpr, descs, bufs, bars, sizes, partial_ptr,
    GROUPS: gl.constexpr, TURNS: gl.constexpr, DRIFT: gl.constexpr, A_REGS: gl.constexpr, ROWS: gl.constexpr,
    N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr, SUBTILES: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Multiplying warpgroup `w`: its rows of every tile of this program or, in turns, every other tile."""
    _, _, _, c_desc, c_more_desc = descs
    a_ring, b_ring, more_ring, c_bufs = bufs
    full, empty, turns = bars
    tiles_m, tiles_n, k_tiles, group_m, split = sizes
    tiles = tiles_m * tiles_n
    PARTS: gl.constexpr = 1 if TURNS else GROUPS
    PART: gl.constexpr = 0 if TURNS else w
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N1, 16])
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N2 if N2 else 16, 16])
    # The products in flight at the end of a step are its own, but none with A in registers, which must have been read.
    PENDING: gl.constexpr = 0 if A_REGS else 2 if N2 else 1
    BEHIND: gl.constexpr = 0 if A_REGS else 1  # how many steps back the products are done then
    programs = gl.num_programs(0)
    c_buf = c_bufs.index(w)
    step = 0
    first = gl.program_id(0)
    stride = programs
    if TURNS:
        step = w * k_tiles
        first += w * programs
        stride = 2 * programs
    turn = 0
    if DRIFT:
        signal = gl.minimum(DRIFT, k_tiles - 1)
    if (DRIFT or A_REGS) and w > 0:
        mbarrier.wait(turns.index(w), 0)
    for item in range(first, tiles * split if SPLIT else tiles, stride):
        tile, part, k_first, k_last = _steps(item, tiles, split, k_tiles, SPLIT)
        c = gl.zeros([ROWS, N1], gl.float32, LAYOUT)
        if N2:
            c_more = gl.zeros([ROWS, N2], gl.float32, MORE)
        if TURNS:
            mbarrier.wait(turns.index(w), (turn & 1) ^ (1 if w == 0 else 0))
            turn += 1
        for ki in range(k_first, k_last):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            a = a_ring.index(stage * PARTS + PART)
            b = b_ring.index(stage)
            if TRANS_A:
                a = a.permute((1, 0))
            if TRANS_B:
                b = b.permute((1, 0))
            if A_REGS:
                a = a.load(gl.DotOperandLayout(0, LAYOUT, 2))
            c = warpgroup_mma(a, b, c, is_async=True)
            if N2:
                b_more = more_ring.index(stage)
                if TRANS_B:
                    b_more = b_more.permute((1, 0))
                if A_REGS:
                    a_more = gl.convert_layout(a, gl.DotOperandLayout(0, MORE, 2))
                    c_more = warpgroup_mma(a_more, b_more, c_more, is_async=True)
                else:
                    c_more = warpgroup_mma(a, b_more, c_more, is_async=True)
            if A_REGS and w < GROUPS - 1:
                # the next group begins while this one's first products run, and stays as far behind
                mbarrier.arrive(turns.index(w + 1), count=1, pred=step == 0)
            if A_REGS:  # a among what is waited for: its registers serve nothing else before
                if N2:
                    c, c_more, a = warpgroup_mma_wait(PENDING, deps=(c, c_more, a))
                else:
                    c, a = warpgroup_mma_wait(PENDING, deps=(c, a))
            elif N2:
                c, c_more = warpgroup_mma_wait(PENDING, deps=(c, c_more))
            else:
                c = warpgroup_mma_wait(PENDING, deps=(c,))
            if DRIFT and w < GROUPS - 1:
                mbarrier.arrive(turns.index(w + 1), count=1, pred=step == signal)
            # the step before is done: its stage is free
            mbarrier.arrive(empty.index((step + STAGES - BEHIND) % STAGES), count=1, pred=ki - k_first >= BEHIND)
            step += 1
        if TURNS:
            mbarrier.arrive(turns.index(1 - w), count=1)
        if N2:
            c, c_more = warpgroup_mma_wait(0, deps=(c, c_more))
        else:
            c = warpgroup_mma_wait(0, deps=(c,))
        if BEHIND:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if TURNS:
            step += k_tiles
        pid_m, pid_n = _position(tile, tiles_m, tiles_n, group_m)
        row = pid_m * (PARTS * ROWS) + PART * ROWS
        column = pid_n * (N1 + N2)
        if SPLIT:
            stride = tiles_n * (N1 + N2)
            part_ptr = partial_ptr + part.to(gl.int64) * (tiles_m * PARTS * ROWS) * stride
            _keep(part_ptr, row, column, c, stride, ROWS, N1, LAYOUT)
            if N2:
                _keep(part_ptr, row, column + N1, c_more, stride, ROWS, N2, MORE)
        elif SUBTILES == 1:
            _send(c_desc, row, column, c, c_buf, LAYOUT)
        else:
            HALF: gl.constexpr = N1 // 2
            SENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
            c0, c1 = c.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
            _send(c_desc, row, column, c0, c_buf, SENT)
            _send(c_desc, row, column + HALF, c1, c_buf, SENT)
        if N2 and not SPLIT:
            _send(c_more_desc, row, column + N1, c_more, c_buf, MORE)
    tma.store_wait(0)


@gluon.jit
def _bars(N: gl.constexpr, COUNT: gl.constexpr):
    """N memory barriers, each of COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


# No value of a size compiles a kernel of its own: one configuration, one kernel.
@gluon.jit(do_not_specialize=["M", "N", "K", "group_m", "split"])
def matmul_gluon_kernel(
    a_desc, b_desc, more_desc, c_desc, c_more_desc, partial_ptr, M, N, K, group_m, split,
    GROUPS: gl.constexpr, TURNS: gl.constexpr, DRIFT: gl.constexpr, A_REGS: gl.constexpr, ROWS: gl.constexpr,
    N1: gl.constexpr, N2: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SUBTILES: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, SPLIT: gl.constexpr, AHEAD_OF: gl.constexpr,
):  # fmt: skip
    """Boxes as stored: of A ROWS x BLOCK_K, of B BLOCK_K x N1 and, more_desc, BLOCK_K x N2; of C ROWS x N1 / SUBTILES
    and ROWS x N2. Without N2, more_desc and c_more_desc are any. With SPLIT, `split` parts go to partial_ptr, fp32
    [split, rows of all tiles, columns of all tiles], and none to C; else partial_ptr is any."""
    if AHEAD_OF:
        gdc_launch_dependents()
    PARTS: gl.constexpr = 1 if TURNS else GROUPS
    dtype: gl.constexpr = a_desc.dtype
    A: gl.constexpr = a_desc.block_type.shape
    B: gl.constexpr = b_desc.block_type.shape
    C: gl.constexpr = c_desc.block_type.shape
    a_ring = gl.allocate_shared_memory(dtype, [STAGES * PARTS, A[0], A[1]], a_desc.layout)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES, B[0], B[1]], b_desc.layout)
    if N2:
        MORE: gl.constexpr = more_desc.block_type.shape
        more_ring = gl.allocate_shared_memory(dtype, [STAGES, MORE[0], MORE[1]], more_desc.layout)
    else:
        more_ring = b_ring
    c_bufs = gl.allocate_shared_memory(dtype, [GROUPS, C[0], C[1]], c_desc.layout)
    bars = (_bars(STAGES, 1), _bars(STAGES, PARTS), _bars(GROUPS, 1))
    fence_async_shared()
    descs = (a_desc, b_desc, more_desc, c_desc, c_more_desc)
    bufs = (a_ring, b_ring, more_ring, c_bufs)
    sizes = (gl.cdiv(M, PARTS * ROWS), gl.cdiv(N, N1 + N2), gl.cdiv(K, BLOCK_K), group_m, split)
    # fmt: off
    if GROUPS == 2:
        gl.warp_specialize([
            (_multiply, (0, descs, bufs, bars, sizes, partial_ptr, GROUPS, TURNS, DRIFT, A_REGS, ROWS, N1, N2,
                         STAGES, SUBTILES, TRANS_A, TRANS_B, SPLIT)),
            (_multiply, (1, descs, bufs, bars, sizes, partial_ptr, GROUPS, TURNS, DRIFT, A_REGS, ROWS, N1, N2,
                         STAGES, SUBTILES, TRANS_A, TRANS_B, SPLIT)),
            (_load, (descs, bufs, bars, sizes, GROUPS, TURNS, ROWS, N1, N2, BLOCK_K, STAGES,
                     TRANS_A, TRANS_B, SPLIT, AHEAD_OF)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_multiply, (0, descs, bufs, bars, sizes, partial_ptr, GROUPS, TURNS, DRIFT, A_REGS, ROWS, N1, N2,
                         STAGES, SUBTILES, TRANS_A, TRANS_B, SPLIT)),
            (_multiply, (1, descs, bufs, bars, sizes, partial_ptr, GROUPS, TURNS, DRIFT, A_REGS, ROWS, N1, N2,
                         STAGES, SUBTILES, TRANS_A, TRANS_B, SPLIT)),
            (_multiply, (2, descs, bufs, bars, sizes, partial_ptr, GROUPS, TURNS, DRIFT, A_REGS, ROWS, N1, N2,
                         STAGES, SUBTILES, TRANS_A, TRANS_B, SPLIT)),
            (_load, (descs, bufs, bars, sizes, GROUPS, TURNS, ROWS, N1, N2, BLOCK_K, STAGES,
                     TRANS_A, TRANS_B, SPLIT, AHEAD_OF)),
        ], [4, 4, 1], [160, 160, 32])
    # fmt: on


@triton.jit(do_not_specialize=["M", "N"])
def sum_parts_kernel(
    partial_ptr, c_ptr, M, N,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """c[M, N] = the sum of partial[SPLIT, whole tiles' rows, whole tiles' columns], fp32, in the order of its parts.
    A program takes ROWS x COLUMNS; N is a multiple of 8. `triton_matmul_tma.reduce_kernel` sums tile by tile, whose
    sides are then powers of 2; here a tile may be 192 x 160."""
    after_the_kernel_before(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # alike in every 8 columns: they are read and written together
    inside = (rows < M)[:, None] & (columns // 8 < N // 8)[None, :]
    stride = tl.cdiv(N, BLOCK_N) * BLOCK_N
    size = tl.cdiv(M, BLOCK_M).to(tl.int64) * BLOCK_M * stride
    at = rows[:, None] * stride + columns[None, :]
    c = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        c += tl.load(partial_ptr + part * size + at, mask=inside, other=0.0)
    row = N // 8 * 8
    tl.store(c_ptr + rows[:, None] * row + columns[None, :], c.to(c_ptr.dtype.element_ty), mask=inside)


# --- launching

SUMMED = (8, 128)  # rows and columns of C per program


@lru_cache(maxsize=64)
def shared_layout(rows: int, columns: int) -> gl.NVMMASharedLayout:
    """The shared-memory layout of a box of 16-bit elements, swizzled as widely as its rows allow."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def _descriptor(x: Tensor, rows: int, columns: int, transposed: bool = False) -> Any:
    """The descriptor of boxes [rows, columns] of a matrix as written, stored `transposed` or not."""
    box = [columns, rows] if transposed else [rows, columns]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, shared_layout(*box))


def launch(
    a: Tensor, b: Tensor, layout: str, m: int, n: int, k: int, config: Any, sm_count: int, out: Tensor | None = None
) -> Tensor:
    """As `triton_matmul_tma.launch`, with a configuration of one of the kinds `matmul_configs.GLUON`; n is a multiple
    of 8. Raises ValueError for stream-K and, since its groups count on whole tiles, a split of a kind but "gluon"."""
    if config.split != 1 and (config.kind != "gluon" or config.split == STREAM):
        raise ValueError(
            f"{config.key} splits k: of the kernel in Gluon only kind 'gluon' does, into a number of parts"
        )
    if out is not None and not suits(out):  # C leaves by tensor-memory copies only
        return out.copy_(launch(a, b, layout, m, n, k, config, sm_count))
    c = torch.empty((m, n), dtype=a.dtype, device=a.device) if out is None else out
    block_k, groups = config.block_k, config.num_warps // 4
    turns = config.kind == "turns"
    rows = config.block_m // (1 if turns else groups)
    n1, n2 = blocks(config.block_n)
    tiles_m, tiles_n = -(-m // config.block_m), -(-n // config.block_n)
    split = min(config.split, -(-k // block_k))
    partial: Any = None
    if split > 1:
        whole = (split, tiles_m * config.block_m, tiles_n * config.block_n)
        partial = torch.empty(whole, dtype=torch.float32, device=a.device)
    trans_a, trans_b = layout[0] == "t", layout[1] == "t"
    b_desc, c_desc = _descriptor(b, block_k, n1, trans_b), _descriptor(c, rows, n1 // config.subtiles)
    with torch.cuda.device_of(a):
        launch_kernel(
            matmul_gluon_kernel, (min(tiles_m * tiles_n * split, sm_count),),
            _descriptor(a, rows, block_k, trans_a), b_desc,
            _descriptor(b, block_k, n2, trans_b) if n2 else b_desc, c_desc, _descriptor(c, rows, n2) if n2 else c_desc,
            c if partial is None else partial, m, n, k, config.group_m, split,
            GROUPS=groups, TURNS=turns, DRIFT=int(config.kind == "drift"), A_REGS=config.kind == "regs", ROWS=rows,
            N1=n1, N2=n2, BLOCK_K=block_k, STAGES=config.num_stages, SUBTILES=config.subtiles,
            TRANS_A=trans_a, TRANS_B=trans_b, SPLIT=split > 1, AHEAD_OF=PDL,
            num_warps=4, maxnreg=REGISTERS[groups][0], **AHEAD,
        )  # fmt: skip
        if partial is not None:
            launch_kernel(
                sum_parts_kernel, (-(-m // SUMMED[0]), -(-n // SUMMED[1])),
                partial, c, m, n, SPLIT=split, BLOCK_M=config.block_m, BLOCK_N=config.block_n, ROWS=SUMMED[0],
                COLUMNS=SUMMED[1], PDL=PDL, num_warps=4, **AHEAD,
            )  # fmt: skip
    return c
