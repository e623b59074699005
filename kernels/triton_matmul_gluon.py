# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Matmul in Gluon, Triton's lower level, for sm_90: one loader and two warpgroups that take tiles in turn.

While one group stores its tile the other multiplies, so that the matrix units do not wait for epilogues: what a
persistent loop in plain Triton cannot express. The loader, one warp, fills a ring of operand stages tile after tile;
the order of the stages alone decides who multiplies when. Import it lazily.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flopcast.kernels.triton_matmul_tma import AHEAD, PDL

# renamed from triton 3.6 to 3.7
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _position(tile, tiles_m, tiles_n, group_m):
    in_group = group_m * tiles_n
    first = tile // in_group * group_m
    rows = min(tiles_m - first, group_m)
    return first + tile % in_group % rows, tile % in_group // rows


@gluon.jit
def _load(
    a_desc, b_desc, a_ring, b_ring, ready, free, tiles_m, tiles_n, k_tiles, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr,
):  # fmt: skip
    """The loader: every k step of every tile of this program, into the ring."""
    programs = gl.num_programs(0)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, programs):
        pid_m, pid_n = _position(tile, tiles_m, tiles_n, group_m)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        for ki in range(k_tiles):
            stage = step % STAGES
            # in the first round the ring is free: a new barrier counts the phase before its first as done
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            k = ki * BLOCK_K
            if TRANS_A:
                tma.async_copy_global_to_shared(a_desc, [k, row], bar, a_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(a_desc, [row, k], bar, a_ring.index(stage))
            if TRANS_B:
                tma.async_copy_global_to_shared(b_desc, [column, k], bar, b_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(b_desc, [k, column], bar, b_ring.index(stage))
            step += 1


@gluon.jit
def _multiply(
    c_desc, a_ring, b_ring, c_tile, ready, free, tiles_m, tiles_n, k_tiles, group_m,
    TURN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr,
):  # fmt: skip
    """A warpgroup: every other tile of this program, from the TURN-th on."""
    programs = gl.num_programs(0)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    step = TURN * k_tiles
    for tile in range(gl.program_id(0) + TURN * programs, tiles_m * tiles_n, 2 * programs):
        c = gl.zeros((BLOCK_M, BLOCK_N), dtype=gl.float32, layout=layout)
        for ki in range(k_tiles):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            a = a_ring.index(stage)
            b = b_ring.index(stage)
            if TRANS_A:
                a = a.permute((1, 0))
            if TRANS_B:
                b = b.permute((1, 0))
            c = warpgroup_mma(a, b, c, is_async=True)
            c = warpgroup_mma_wait(1, deps=(c,))
            # the step before is done, by every warp of the group: its stage is free
            _barrier()
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=ki > 0)
            step += 1
        c = warpgroup_mma_wait(0, deps=(c,))
        _barrier()
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
        tma.store_wait(0)  # the copy of the tile before has read c_tile
        _barrier()
        c_tile.store(c.to(c_desc.dtype))
        fence_async_shared()
        _barrier()
        pid_m, pid_n = _position(tile, tiles_m, tiles_n, group_m)
        tma.async_copy_shared_to_global(c_desc, [pid_m * BLOCK_M, pid_n * BLOCK_N], c_tile)
        step += k_tiles
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "group_m"])
def matmul_gluon_kernel(
    a_desc, b_desc, c_desc, M, N, K, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, AHEAD_OF: gl.constexpr,
):  # fmt: skip
    if AHEAD_OF:
        gdc_wait()
        gdc_launch_dependents()
    a_ring = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES, BLOCK_K, BLOCK_M] if TRANS_A else [STAGES, BLOCK_M, BLOCK_K], a_desc.layout
    )
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K] if TRANS_B else [STAGES, BLOCK_K, BLOCK_N], b_desc.layout
    )
    c_0 = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    c_1 = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    k_tiles = gl.cdiv(K, BLOCK_K)
    gl.warp_specialize(
        [
            (_multiply, (c_desc, a_ring, b_ring, c_0, ready, free, tiles_m, tiles_n, k_tiles, group_m,
                         0, BLOCK_M, BLOCK_N, STAGES, TRANS_A, TRANS_B)),
            (_multiply, (c_desc, a_ring, b_ring, c_1, ready, free, tiles_m, tiles_n, k_tiles, group_m,
                         1, BLOCK_M, BLOCK_N, STAGES, TRANS_A, TRANS_B)),
            (_load, (a_desc, b_desc, a_ring, b_ring, ready, free, tiles_m, tiles_n, k_tiles, group_m,
                     BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANS_A, TRANS_B)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def _descriptor(x: Tensor, rows: int, columns: int) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor(x, x.shape, x.stride(), [rows, columns], layout)


def launch(
    a: Tensor, b: Tensor, layout: str, m: int, n: int, k: int, config: Any, sm_count: int, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """As `triton_matmul_tma.launch`, of whole tiles; n must be a multiple of 8."""
    c = torch.empty((m, n), dtype=a.dtype, device=a.device) if out is None else out
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    tiles = -(-m // block_m) * -(-n // block_n)
    trans_a, trans_b = layout[0] == "t", layout[1] == "t"
    with torch.cuda.device_of(a):
        matmul_gluon_kernel[(min(tiles, sm_count),)](
            _descriptor(a, block_k, block_m) if trans_a else _descriptor(a, block_m, block_k),
            _descriptor(b, block_n, block_k) if trans_b else _descriptor(b, block_k, block_n),
            _descriptor(c, block_m, block_n),
            m, n, k, config.group_m,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=config.num_stages,
            TRANS_A=trans_a, TRANS_B=trans_b, AHEAD_OF=PDL, num_warps=4, **AHEAD,
        )  # fmt: skip
    return c
