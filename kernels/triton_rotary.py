# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Rotary embedding of queries and keys in Triton, by an angle or its negative. Imports triton: import lazily.

Tiles, tables and layouts are those of `triton_rope`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch
from flopcast.kernels.triton_rope import _halves, _place, _sizes, _table_strides


@triton.jit
def _rotate_tile(
    x_ptr, cos_ptr, sin_ptr, out_ptr, tile, tokens, seq, stride_b, stride_s, stride_h, stride_tb, stride_ts,
    BACKWARDS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, exists, batch, position, head = _place(tile, tokens, seq, HEADS, ROWS)
    column = tl.arange(0, HALF)
    mask = exists[:, None] & (column < D // 2)[None, :]
    base = batch * stride_b + position * stride_s + head * stride_h
    x1, x2 = _halves(x_ptr + base[:, None] + column[None, :], mask, D)
    table = (batch * stride_tb + position * stride_ts)[:, None] + column[None, :]
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)
    if BACKWARDS:
        sin = -sin
    at = out_ptr + row[:, None] * D + column[None, :]
    tl.store(at, (x1 * cos - x2 * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(at + D // 2, (x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, tokens, seq, q_tiles,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_tb, stride_ts,
    BACKWARDS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The programs below q_tiles take one tile of queries each, the others one of keys."""
    tile = tl.program_id(0)
    if tile < q_tiles:
        _rotate_tile(
            q_ptr, cos_ptr, sin_ptr, q_out_ptr, tile, tokens, seq, stride_qb, stride_qs, stride_qh, stride_tb,
            stride_ts, BACKWARDS, HEADS, D, HALF, ROWS,
        )  # fmt: skip
    else:
        _rotate_tile(
            k_ptr, cos_ptr, sin_ptr, k_out_ptr, tile - q_tiles, tokens, seq, stride_kb, stride_ks, stride_kh,
            stride_tb, stride_ts, BACKWARDS, KV_HEADS, D, HALF, ROWS,
        )  # fmt: skip


def launch_rotation(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backwards: bool, q_out: Tensor, k_out: Tensor, config: Any
) -> None:
    tokens, q_tiles, k_tiles, constants = _sizes(q, k, config)
    with torch.cuda.device_of(q):
        launch(
            rotary_kernel, (q_tiles + k_tiles,),
            q, k, cos, sin, q_out, k_out, tokens, q.shape[1], q_tiles,
            *q.stride()[:3], *k.stride()[:3], *_table_strides(cos), BACKWARDS=backwards, **constants,
            num_warps=config.num_warps,
        )  # fmt: skip
