# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton matmul by tensor-memory copies (sm_90 on): persistent, with split-K and stream-K. Import it lazily.

C[m, n] = A[m, k] B[k, n], 16-bit, accumulated in fp32. Descriptors lie on the operands as stored, and a tile is
transposed in the kernel (TRANS_*), so that one kernel serves nt, nn, tn and tt. Copies fill with zeros beyond an edge,
and drop what lies beyond C's.

Three ways to share the work among the programs, all of one kernel:
- whole tiles: a persistent loop, whose next tile is loaded during the epilogue of the last (flatten);
- split-K: SPLIT programs per tile, each for a part of k;
- stream-K: the iterations of the last, partly filled wave and of one full wave are dealt out evenly, a program's share
  running over the tile boundaries; the other waves are whole tiles.
A partial tile goes to a workspace in fp32; the program that finishes its tile last sums the parts, always in the order
of k: results are the same from run to run. Or, with many parts, a second kernel sums them (REDUCE).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flopcast.kernels.launching import asked_each_time
from flopcast.kernels.launching import launch as launch_kernel
from flopcast.kernels.matmul_configs import blocks


@triton.jit
def tile_position(tile, tiles_m, tiles_n, group_m):
    """(row, column) of a tile; tiles are walked in groups of group_m rows, which keeps the operands in L2."""
    in_group = group_m * tiles_n
    first = tile // in_group * group_m
    rows = min(tiles_m - first, group_m)
    return first + tile % in_group % rows, tile % in_group // rows


@triton.jit
def _load_a(desc, row, k, TRANS: tl.constexpr):
    """A tile [BLOCK_M, BLOCK_K] of A as written, stored [m, k] or, TRANS, [k, m]."""
    return desc.load([k, row]).T if TRANS else desc.load([row, k])


@triton.jit
def _load_b(desc, k, column, TRANS: tl.constexpr):
    """A tile [BLOCK_K, BLOCK_N] of B as written, stored [k, n] or, TRANS, [n, k]."""
    return desc.load([column, k]).T if TRANS else desc.load([k, column])


@triton.jit
def _store(
    c_desc, c_ptr, c, row, column, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr, C_TMA: tl.constexpr,
):  # fmt: skip
    """A tile of C. In SUBTILES parts, so that the copy's buffer leaves room for one more stage of operands."""
    if C_TMA:
        if SUBTILES == 1:
            c_desc.store([row, column], c.to(c_desc.dtype))
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            c0, c1 = c.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
            if SUBTILES == 2:
                c_desc.store([row, column], c0.to(c_desc.dtype))
                c_desc.store([row, column + HALF], c1.to(c_desc.dtype))
            else:
                QUARTER: tl.constexpr = BLOCK_N // 4
                c00, c01 = c0.reshape(BLOCK_M, 2, QUARTER).permute(0, 2, 1).split()
                c_desc.store([row, column], c00.to(c_desc.dtype))
                c_desc.store([row, column + QUARTER], c01.to(c_desc.dtype))
                c10, c11 = c1.reshape(BLOCK_M, 2, QUARTER).permute(0, 2, 1).split()
                c_desc.store([row, column + HALF], c10.to(c_desc.dtype))
                c_desc.store([row, column + HALF + QUARTER], c11.to(c_desc.dtype))
    else:
        # 64-bit origin: 16384 tokens x 151,937 logits are past 2^31 elements
        in_m = tl.arange(0, BLOCK_M)
        in_n = tl.arange(0, BLOCK_N)
        mask = (row + in_m < M)[:, None] & (column + in_n < N)[None, :]
        start = c_ptr + row.to(tl.int64) * N + column
        offsets = in_m.to(tl.int64)[:, None] * N + in_n[None, :]
        tl.store(start + offsets, c.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def after_the_kernel_before(PDL: tl.constexpr):
    """Waits until the kernel launched before has ended, when this one was launched ahead of its end (programmatic
    dependent launch), and lets the next be launched."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["M", "N", "K", "stream_tiles", "group_m"])
def matmul_tma_kernel(
    a_desc, b_desc, c_desc, more_desc, c_more_desc, c_ptr, partial_ptr, counter_ptr,
    M, N, K, stream_tiles, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MORE_M: tl.constexpr, MORE_N: tl.constexpr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, SUBTILES: tl.constexpr, C_TMA: tl.constexpr,
    WHOLE: tl.constexpr, STREAM: tl.constexpr, REDUCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile is BLOCK_M + MORE_M by BLOCK_N + MORE_N, of which one MORE is 0: blocks are powers of 2, and a tile of 192
    is two. more_desc: what the second block needs of A or B; c_more_desc: of C. Such tiles are whole.

    The first `stream_tiles` tiles are dealt out by iterations (STREAM), the others whole (WHOLE).

    Workspace: partial_ptr fp32 [programs, 2, BLOCK_M, BLOCK_N], a program's parts: slot 0 its first, 1 its last. With
    REDUCE [programs, BLOCK_M, BLOCK_N], and `reduce_kernel` comes after. counter_ptr int32 [stream_tiles], iterations
    done of each tile: 0 before and after.
    """
    after_the_kernel_before(PDL)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M + MORE_M)
    tiles_n = tl.cdiv(N, BLOCK_N + MORE_N)
    tiles = tiles_m * tiles_n
    k_tiles = tl.cdiv(K, BLOCK_K)

    if STREAM:
        SLOTS: tl.constexpr = 1 if REDUCE else 2
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        total = (stream_tiles * k_tiles).to(tl.int64)
        begin = (pid * total // programs).to(tl.int32)
        end = ((pid + 1) * total // programs).to(tl.int32)
        at = begin
        while at < end:
            tile = at // k_tiles
            tile_begin = tile * k_tiles
            k_first = at - tile_begin
            k_last = min(k_tiles, end - tile_begin)
            pid_m, pid_n = tile_position(tile, tiles_m, tiles_n, group_m)
            row = pid_m * BLOCK_M
            column = pid_n * BLOCK_N
            part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for ki in range(k_first, k_last):
                a = _load_a(a_desc, row, ki * BLOCK_K, TRANS_A)
                b = _load_b(b_desc, ki * BLOCK_K, column, TRANS_B)
                part = tl.dot(a, b, part)
            if REDUCE:
                tl.store(partial_ptr + pid.to(tl.int64) * TILE + in_tile, part)
            elif k_last - k_first == k_tiles:
                _store(c_desc, c_ptr, part, row, column, M, N, BLOCK_M, BLOCK_N, SUBTILES, C_TMA)
            else:
                slot = pid.to(tl.int64) * SLOTS + (at != begin).to(tl.int64)
                tl.store(partial_ptr + slot * TILE + in_tile, part)
                tl.debug_barrier()  # every thread's part is written before the counter says so
                before = tl.atomic_add(counter_ptr + tile, k_last - k_first, sem="acq_rel")
                if before + (k_last - k_first) == k_tiles:
                    tl.store(counter_ptr + tile, 0)  # ready for the next call
                    # iteration i is of program ((i + 1) programs - 1) // total: the last that begins at i or before
                    first = (((tile_begin + 1).to(tl.int64) * programs - 1) // total).to(tl.int32)
                    last = (((tile_begin + k_tiles).to(tl.int64) * programs - 1) // total).to(tl.int32)
                    summed = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                    for p in range(first, last + 1):
                        starts_before = (p * total // programs).to(tl.int32) < tile_begin
                        part_slot = (p * SLOTS + starts_before.to(tl.int32)).to(tl.int64)
                        summed += tl.load(partial_ptr + part_slot * TILE + in_tile, cache_modifier=".cg")
                    _store(c_desc, c_ptr, summed, row, column, M, N, BLOCK_M, BLOCK_N, SUBTILES, C_TMA)
            at = tile_begin + k_last

    if WHOLE:
        # the epilogue counts its tiles itself: else their positions stay in registers through the loop
        tile_c = stream_tiles + pid - programs
        # Two accumulators in one flattened loop: ptxas runs their products one after another (its C7515)
        FLATTEN: tl.constexpr = MORE_M + MORE_N == 0
        for tile in tl.range(stream_tiles + pid, tiles, programs, flatten=FLATTEN):
            pid_m, pid_n = tile_position(tile, tiles_m, tiles_n, group_m)
            row = pid_m * (BLOCK_M + MORE_M)
            column = pid_n * (BLOCK_N + MORE_N)
            c = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            if MORE_M:
                c_more = tl.zeros((MORE_M, BLOCK_N), dtype=tl.float32)
            elif MORE_N:
                c_more = tl.zeros((BLOCK_M, MORE_N), dtype=tl.float32)
            for ki in range(k_tiles):
                a = _load_a(a_desc, row, ki * BLOCK_K, TRANS_A)
                b = _load_b(b_desc, ki * BLOCK_K, column, TRANS_B)
                if MORE_M:
                    a_more = _load_a(more_desc, row + BLOCK_M, ki * BLOCK_K, TRANS_A)
                elif MORE_N:
                    b_more = _load_b(more_desc, ki * BLOCK_K, column + BLOCK_N, TRANS_B)
                c = tl.dot(a, b, c)
                if MORE_M:
                    c_more = tl.dot(a_more, b, c_more)
                elif MORE_N:
                    c_more = tl.dot(a, b_more, c_more)
            tile_c += programs
            pid_m, pid_n = tile_position(tile_c, tiles_m, tiles_n, group_m)
            row_c = pid_m * (BLOCK_M + MORE_M)
            column_c = pid_n * (BLOCK_N + MORE_N)
            _store(c_desc, c_ptr, c, row_c, column_c, M, N, BLOCK_M, BLOCK_N, SUBTILES, C_TMA)
            if MORE_M:
                _store(c_more_desc, c_ptr, c_more, row_c + BLOCK_M, column_c, M, N, MORE_M, BLOCK_N, 1, C_TMA)
            elif MORE_N:
                _store(c_more_desc, c_ptr, c_more, row_c, column_c + BLOCK_N, M, N, BLOCK_M, MORE_N, 1, C_TMA)


@triton.jit(do_not_specialize=["M", "N", "group_m"])
def reduce_kernel(
    partial_ptr, c_ptr, M, N, group_m,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """C = the sum of the SPLIT parts of each tile, in the order of k. A program takes ROWS rows of a tile."""
    after_the_kernel_before(PDL)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    in_m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_n = tl.arange(0, BLOCK_N)
    offsets = in_m[:, None] * BLOCK_N + in_n[None, :]
    start = partial_ptr + tile.to(tl.int64) * (SPLIT * BLOCK_M * BLOCK_N)
    c = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        c += tl.load(start + part * (BLOCK_M * BLOCK_N) + offsets)
    pid_m, pid_n = tile_position(tile, tiles_m, tiles_n, group_m)
    rows = pid_m * BLOCK_M + in_m
    columns = pid_n * BLOCK_N + in_n
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], c.to(c_ptr.dtype.element_ty), mask=mask)


# --- launching

# Programmatic dependent launch: this kernel's blocks are put on the multiprocessors as those of the kernel before
# leave, and wait there for its end, which saves 0.3 us (H200: 5% below 1 GFLOP, nothing from 10 on). FLOPCAST_PDL=0
# turns it off.
PDL = isinstance(matmul_tma_kernel, triton.JITFunction) and os.environ.get("FLOPCAST_PDL", "1") == "1"
AHEAD: dict[str, Any] = {"launch_pdl": True} if PDL else {}


def suits(x: Tensor) -> bool:
    """Whether a descriptor can lie on this matrix: 16-bit, rows contiguous, base and rows at multiples of 16 bytes."""
    return (
        x.element_size() == 2
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and x.stride(0) >= x.shape[1]
    )


COUNTERS = 1024  # of a stream: splitting is for few tiles
CAPTURED_COUNTERS = 1 << 20
# Zero between calls: a kernel leaves its counters as it finds them. Calls of one stream follow one another and share.
_of_stream: dict[tuple[int, int], Tensor] = {}
# A graph may be replayed on any stream: every captured call takes the next counters of a large ring.
_of_graphs: dict[int, tuple[Tensor, int]] = {}


def _lasting_zeros(device: torch.device, count: int) -> Tensor:
    """int32 zeros to keep. Allocated by another thread: what the thread that warms up or records a CUDA graph allocates
    comes from the graph's memory, which torch gives out again (`mode="reduce-overhead"` warms up so)."""

    def make() -> Tensor:
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        return zeros

    with ThreadPoolExecutor(1) as other:
        return other.submit(make).result()


@asked_each_time
def _counters(device: torch.device, count: int) -> Tensor:
    """int32 zeros for `count` tiles, used by no other call that may run at the same time."""
    if device.type != "cuda" or count > COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        if index not in _of_graphs:  # captured before any call: zeroed at each replay
            return torch.zeros(count, dtype=torch.int32, device=device)
        ring, used = _of_graphs[index]
        room = -(-count // 32) * 32  # aligned: else each alignment would be compiled for
        start = used if used + room <= CAPTURED_COUNTERS else 0
        _of_graphs[index] = (ring, start + room)
        return ring[start : start + count]
    if index not in _of_graphs:
        _of_graphs[index] = (_lasting_zeros(torch.device("cuda", index), CAPTURED_COUNTERS), 0)
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _of_stream:
        _of_stream[key] = _lasting_zeros(torch.device("cuda", index), COUNTERS)
    return _of_stream[key]


def shares(config: Any, tiles: int, k_tiles: int, sm_count: int) -> tuple[int, int]:
    """(programs, tiles dealt out by iterations) of a launch; (programs, 0) where all are whole."""
    slots = sm_count * config.per_sm
    whole = (min(tiles, slots), 0)
    if config.split == 0:
        if tiles % slots == 0:
            return whole
        if tiles > slots:
            return slots, tiles - (tiles // slots - 1) * slots
        return max(tiles, min(slots, tiles * k_tiles // 2)), tiles
    split = min(config.split, k_tiles)
    return (tiles * split, tiles) if split > 1 else whole


def launch(
    a: Tensor, b: Tensor, layout: str, m: int, n: int, k: int, config: Any, sm_count: int, out: Tensor | None = None
) -> Tensor:
    """c[m, n] of operands as stored, both of which `suits` passes, with a `matmul_configs.MatmulConfig` of kind "tma".

    `out`: contiguous, written and returned.
    """
    c = torch.empty((m, n), dtype=a.dtype, device=a.device) if out is None else out
    block_k = config.block_k
    block_m, more_m = blocks(config.block_m)
    block_n, more_n = blocks(config.block_n)
    tiles, k_tiles = -(-m // config.block_m) * -(-n // config.block_n), -(-k // block_k)
    programs, stream_tiles = shares(config, tiles, k_tiles, sm_count)
    trans_a, trans_b = layout[0] == "t", layout[1] == "t"
    reduce = config.reduce and config.split > 1 and stream_tiles > 0
    c_tma = not reduce and suits(c)
    partial: Any = None
    counters: Any = None
    if stream_tiles:
        sizes = (tiles, programs // tiles) if reduce else (programs, 2)
        partial = torch.empty((*sizes, block_m, block_n), dtype=torch.float32, device=a.device)
        if not reduce:
            counters = _counters(a.device, stream_tiles)
    more = c_more = None
    if more_m:
        more = _descriptor(a, more_m, block_k, trans_a)
        c_more = _descriptor(c, more_m, block_n) if c_tma else None
    elif more_n:
        more = _descriptor(b, block_k, more_n, trans_b)
        c_more = _descriptor(c, block_m, more_n) if c_tma else None
    with torch.cuda.device_of(a):
        launch_kernel(
            matmul_tma_kernel, (programs,),
            _descriptor(a, block_m, block_k, trans_a), _descriptor(b, block_k, block_n, trans_b),
            _descriptor(c, block_m, block_n // config.subtiles) if c_tma else None,
            more, c_more, c, partial, counters,
            m, n, k, stream_tiles, config.group_m,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, MORE_M=more_m, MORE_N=more_n,
            TRANS_A=trans_a, TRANS_B=trans_b, SUBTILES=config.subtiles, C_TMA=c_tma,
            WHOLE=stream_tiles < tiles, STREAM=stream_tiles > 0, REDUCE=reduce, PDL=PDL,
            num_warps=config.num_warps, num_stages=config.num_stages, **AHEAD,
        )  # fmt: skip
        if reduce:
            add_parts(partial, c, config, PDL)
    return c


def _descriptor(x: Tensor, rows: int, columns: int, transposed: bool = False) -> TensorDescriptor:
    """The descriptor of blocks [rows, columns] of a matrix as written, stored `transposed` or not."""
    return TensorDescriptor(x, x.shape, x.stride(), [columns, rows] if transposed else [rows, columns])


def add_parts(partial: Tensor, c: Tensor, config: Any, pdl: bool = False) -> None:
    """c[m, n], contiguous, = the sum over parts of partial[tiles, parts, block_m, block_n]. `pdl`: launched ahead of
    the end of the kernel before (sm_90)."""
    tiles, split = partial.shape[:2]
    rows = min(config.block_m, max(1, 2048 // config.block_n))
    launch_kernel(
        reduce_kernel, (tiles, config.block_m // rows),
        partial, c, c.shape[0], c.shape[1], config.group_m,
        SPLIT=split, BLOCK_M=config.block_m, BLOCK_N=config.block_n, ROWS=rows, PDL=pdl, num_warps=4,
        **(AHEAD if pdl else {}),
    )  # fmt: skip
