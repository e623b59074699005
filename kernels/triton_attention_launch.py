# mypy: disable-error-code="no-untyped-call"
"""Launches the Hopper attention kernels: tensor-memory descriptors, grids, buffers.

Imports triton and its Gluon: import this module inside functions only.

Operands are [batch, heads, seq, head_dim] views; a descriptor of four dimensions reads them in place, whatever their
strides, if rows start at multiples of 16 bytes. Rows past seq read as zero and are not written.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flopcast.kernels import triton_attention_hopper as hopper
from flopcast.kernels import triton_attention_hopper_dkdv as hopper_dkdv
from flopcast.kernels import triton_attention_hopper_dq as hopper_dq
from flopcast.kernels import triton_attention_hopper_onepass as hopper_onepass
from flopcast.kernels.attention_config import AttentionConfig, Tile
from flopcast.kernels.attention_schedule import KEYS, deal_tiles, even_section
from flopcast.kernels.launching import asked_each_time, launch
from flopcast.kernels.sizes import cdiv

VERSION: str = triton.__version__
LOG2_E = 1.4426950408889634
MATRIX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
SUMS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
VECTOR = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
REGISTERS = 168  # per thread at launch, for 12 warps; the computing ones then take 240, the loading ones keep 24


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _readable(x: Tensor) -> Tensor:
    """x, or a copy where a descriptor cannot read it in place: rows not at multiples of 16 bytes, or repeated."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    fits = x.stride(-1) == 1 and all(stride > 0 and stride % 8 == 0 for stride in strides[:-1])
    if fits and x.data_ptr() % 16 == 0:
        return x
    batch, heads, seq, dim = x.shape
    return torch.empty((batch, seq, heads, dim), dtype=x.dtype, device=x.device).transpose(1, 2).copy_(x)


def _matrix(x: Tensor, rows: int) -> TensorDescriptor:
    """The descriptor of boxes of `rows` rows of one head."""
    batch, heads, seq, dim = x.shape
    # the stride of a dimension of size 1 can be anything: make it a valid one
    strides = [stride if size > 1 else dim for stride, size in zip(x.stride(), x.shape, strict=True)]
    return TensorDescriptor(x, [batch, heads, seq, dim], [*strides[:3], 1], [1, 1, rows, dim], MATRIX)


def _vector(x: Tensor, length: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, length], VECTOR)


def section_of(pairs: int, group: int, rows: int, row_bytes: int, tile: Tile) -> int:
    """How many of the `pairs` (batch, head) pairs to process at a time, so that what they share stays in L2.

    `group` of them share `rows` rows of `row_bytes`. `tile.l2_mib`: how much of L2 to count on; 0: no sections.
    """
    if not tile.l2_mib:
        return pairs
    return min(pairs, group * max(1, (tile.l2_mib << 20) // (rows * row_bytes)))


def _grid(tiles: int, tile: Tile, device: torch.device) -> tuple[int]:
    return (min(tiles, _multiprocessors(device)) if tile.persistent else tiles,)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, tile: Tile
) -> None:
    """Writes o ([batch, heads, seq, head_dim] of any such strides) and lse."""
    q, k, v = map(_readable, (q, k, v))
    batch, heads, seq, _ = q.shape
    pairs = batch * heads // (2 if tile.pack else 1)
    blocks = cdiv(seq, 64 if tile.pack else 128)
    group = heads // k.shape[1]
    section = section_of(pairs, max(1, group // 2) if tile.pack else group, seq, 4 * q.shape[3], tile)
    with torch.cuda.device_of(q):
        launch(
            hopper.forward_kernel, _grid(pairs * blocks, tile, q.device),
            _matrix(q, 64), _matrix(k, tile.block_n), _matrix(v, tile.block_n), _matrix(o, 64), lse,
            heads, group, seq, pairs, blocks, scale * LOG2_E, section,
            CAUSAL=causal, SECTIONS=tile.l2_mib > 0, PACK=tile.pack, PINGPONG=tile.pingpong, BLOCK_N=tile.block_n,
            STAGES=tile.num_stages, num_warps=tile.num_warps, maxnreg=REGISTERS,
        )  # fmt: skip


def _rows_of_tiles(o: Tensor) -> tuple[Tensor, Tensor]:
    """Room for lse in base 2 and delta: fp32 [batch * heads, seq padded to whole tiles]."""
    batch, heads, seq, _ = o.shape
    lse2, delta = torch.empty((2, batch * heads, cdiv(seq, 128) * 128), dtype=torch.float32, device=o.device)
    return lse2, delta


def _prepare(o: Tensor, do: Tensor, lse: Tensor, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(lse in base 2, delta) in such rows; clears `sums`, fp32 of as many rows of head_dim."""
    batch, heads, seq, dim = o.shape
    lse2, delta = _rows_of_tiles(o)
    padded, block = lse2.shape[1], 64
    launch(
        hopper_dkdv.prepare_kernel, (batch * heads, padded // block),
        o, do, lse, lse2, delta, sums, *o.stride()[:3], *do.stride()[:3], heads, seq, padded,
        D=dim, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
    return lse2, delta


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    causal: bool, scale: float, config: AttentionConfig,
) -> None:  # fmt: skip
    """Writes dq, dk and dv."""
    do, q, k, v = map(_readable, (do, q, k, v))
    with torch.cuda.device_of(q):
        if config.dkdv.onepass:
            _launch_onepass(do, q, k, v, o, lse, dq, dk, dv, causal, scale, config.dkdv)
            return
        if config.dq.delta:
            lse2, delta = _rows_of_tiles(o)
            _launch_dq(do, q, k, v, lse2, delta, dq, causal, scale, config.dq, _readable(o), lse)
        else:
            lse2, delta = _prepare(o, do, lse)
        _launch_dkdv(do, q, k, v, lse2, delta, dk, dv, causal, scale, config.dkdv)
        if not config.dq.delta:
            _launch_dq(do, q, k, v, lse2, delta, dq, causal, scale, config.dq)


def _launch_dkdv(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse2: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    causal: bool, scale: float, tile: Tile,
) -> None:  # fmt: skip
    kv_heads, seq = k.shape[1:3]
    pairs = k.shape[0] * kv_heads
    tiles = pairs * cdiv(seq, 128)
    group = q.shape[1] // kv_heads
    section = section_of(pairs, 1, group * seq, 4 * q.shape[3], tile)
    rows = [_matrix(x, tile.block_m) for x in (q, do)]
    keys = [_matrix(x, 64) for x in (k, v, dk, dv)]
    vectors: list[Any] = [_vector(x, tile.block_m) for x in (lse2, delta)]
    launch(
        hopper_dkdv.dkdv_kernel, _grid(tiles, tile, q.device),
        *rows, *keys, *vectors, kv_heads, group, seq, pairs, tiles, scale, scale * LOG2_E, section,
        CAUSAL=causal, SECTIONS=tile.l2_mib > 0, SKIP=tile.skip and causal, BLOCK_M=tile.block_m,
        STAGES=tile.num_stages, num_warps=tile.num_warps, maxnreg=REGISTERS,
    )  # fmt: skip


def _launch_dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse2: Tensor, delta: Tensor, dq: Tensor,
    causal: bool, scale: float, tile: Tile, o: Tensor | None = None, lse: Tensor | None = None,
) -> None:  # fmt: skip
    """With o and lse it writes lse2 and delta."""
    batch, heads, seq, _ = q.shape
    pairs, blocks, group = batch * heads, cdiv(seq, 128), heads // k.shape[1]
    section = section_of(pairs, group, seq, 4 * q.shape[3], tile)
    launch(
        hopper_dq.dq_kernel, _grid(pairs * blocks, tile, q.device),
        _matrix(q, 64), _matrix(do, 64), _matrix(k, tile.block_n), _matrix(v, tile.block_n), _matrix(dq, 64),
        None if o is None else _matrix(o, 64), lse2, delta, lse,
        heads, group, seq, lse2.shape[1], pairs, blocks, scale, scale * LOG2_E, section,
        CAUSAL=causal, SECTIONS=tile.l2_mib > 0, DELTA=o is not None, BLOCK_N=tile.block_n, STAGES=tile.num_stages,
        num_warps=tile.num_warps, maxnreg=REGISTERS,
    )  # fmt: skip


_SCHEDULES: dict[tuple[object, ...], Tensor] = {}  # kept: a CUDA graph may hold their addresses


@asked_each_time
def _schedule(pairs: int, blocks: int, causal: bool, section: int, programs: int, device: torch.device) -> Tensor:
    """`deal_tiles` as the kernel reads it: int32, at i where the tiles of program i begin, then all of them."""
    key = pairs, blocks, causal, section, programs, device
    if key not in _SCHEDULES:
        tiles = deal_tiles(pairs, blocks, causal, section, programs)
        begins = accumulate(map(len, tiles), initial=programs + 1)
        _SCHEDULES[key] = torch.tensor([*begins, *chain(*tiles)], dtype=torch.int32).to(device)
    return _SCHEDULES[key]


def _launch_onepass(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    causal: bool, scale: float, tile: Tile,
) -> None:  # fmt: skip
    batch, heads, seq, dim = q.shape
    kv_heads, padded = k.shape[1], cdiv(seq, KEYS) * KEYS
    pairs, blocks = batch * kv_heads, cdiv(seq, KEYS)
    programs = min(pairs * blocks, _multiprocessors(q.device))
    section = even_section(pairs, seq, dim, tile.l2_mib << 20)
    sums = torch.empty((batch * heads * padded, dim), dtype=torch.float32, device=q.device)
    lse2, delta = _prepare(o, do, lse, sums)
    launch(
        hopper_onepass.onepass_kernel, (programs,),
        *(_matrix(x, tile.block_m) for x in (q, do)), *(_matrix(x, KEYS) for x in (k, v, dk, dv)),
        *(_vector(x, tile.block_m) for x in (lse2, delta)),
        TensorDescriptor(sums, list(sums.shape), [dim, 1], [tile.block_m, dim], SUMS),
        _schedule(pairs, blocks, causal, section, programs, q.device),
        kv_heads, heads // kv_heads, seq, padded, scale, scale * LOG2_E,
        CAUSAL=causal, BLOCK_M=tile.block_m, STAGES=tile.num_stages, num_warps=tile.num_warps, maxnreg=REGISTERS,
    )  # fmt: skip
    block = 64
    launch(
        hopper_onepass.dq_scale_kernel, (batch * heads, padded // block),
        sums, dq, *dq.stride()[:3], heads, seq, padded, scale, D=dim, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
