# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Loss and gradient from one read of the logits, in Triton: a row is shared by programs that hold it in registers.

Imports triton: import this module inside functions only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch
from flopcast.kernels.sizes import cdiv, next_power_of_2
from flopcast.kernels.triton_cross_entropy import LOG2_E, VEC, _block, _offsets, _online, _times_log2e


@triton.jit
def _merged(largest, total, largest2, total2):
    """Maximum and sum of exponentials of the union of two sets, from those of each."""
    now = tl.maximum(largest, largest2)
    base = tl.where(now == float("-inf"), 0.0, now) * LOG2_E
    return now, total * tl.exp2(largest * LOG2_E - base) + total2 * tl.exp2(largest2 * LOG2_E - base)


@triton.jit
def _unpacked(pairs, kind: tl.constexpr, OPAQUE: tl.constexpr):
    """fp32 [n, VEC] from words [n, VEC / 2] of two 16-bit numbers each. OPAQUE: unpacks them behind inline assembly;
    without it the compiler keeps what it unpacked, in twice the registers, for the next use."""
    if OPAQUE:
        pairs = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [pairs], tl.int32, is_pure=False, pack=1)
    first = pairs.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    second = (pairs >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(first, second), pairs.shape[0], pairs.shape[1] * 2)


@triton.jit
def split_kernel(
    pairs_ptr, logits_ptr, target_ptr, losses_ptr, count_ptr, out_ptr, words_ptr, stride_pairs, stride, out_stride,
    vocab, ignore_index, SPLIT: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    OPAQUE: tl.constexpr,
):  # fmt: skip
    """Loss and gradient from one read: SPLIT neighbouring programs per row, each with its block of it in registers.

    The block is held as it came, two 16-bit numbers per register (pairs: the logits as int32), and widened a piece at a
    time, so that 128 KB of rows are on each multiprocessor of Hopper. The programs of a row tell one another maximum
    and sum in one word each (words: int64 [rows, SLOTS], zero before), which is both number and flag: no fence, one
    trip to the L2 and back. Programs start in the order of their numbers, so that those waited for run already or
    start before any of a later row: none waits for ever, if SPLIT of them fit the device at all. All add up in the
    same order: bit-identical runs.
    """
    PIECE: tl.constexpr = BLOCK // PIECES
    kind: tl.constexpr = out_ptr.dtype.element_ty
    nothing: tl.constexpr = -0x007F0080 if kind == tl.bfloat16 else -0x03FF0400  # two of -inf
    row = (tl.program_id(0) // SPLIT).to(tl.int64)
    part = tl.program_id(0) % SPLIT
    target = tl.load(target_ptr + row)
    start = part * BLOCK
    out = out_ptr + row * out_stride
    if target == ignore_index:
        for i in tl.static_range(PIECES):
            at = start + i * PIECE + _offsets(PIECE)
            tl.store(out + at, tl.zeros((PIECE // VEC, VEC), kind), mask=at < vocab)
        if part == 0:
            tl.store(losses_ptr + row, 0.0)
    else:
        pairs = ()
        for i in tl.static_range(PIECES):
            lane = tl.arange(0, PIECE // VEC)[:, None] * (VEC // 2)
            at = (start + i * PIECE) // 2 + lane + tl.arange(0, VEC // 2)[None, :]
            row_ptr = pairs_ptr + row * stride_pairs
            loaded = tl.load(row_ptr + at, mask=at < vocab // 2, other=nothing, eviction_policy="evict_first")
            pairs = pairs + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
        valid = (target >= 0) & (target < vocab)
        owns = part == tl.where(valid, target, 0) // BLOCK  # the target's logit, or a NaN
        logit = tl.load(logits_ptr + row * stride + target, mask=owns & valid, other=float("nan")).to(tl.float32)
        scale = 1.0 / tl.load(count_ptr)
        largest = tl.full((PIECE // VEC,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((PIECE // VEC,), dtype=tl.float32)
        if start < vocab:  # always: only a branch keeps the compiler from adding up before it sends for the last pieces
            for i in tl.static_range(PIECES):
                largest, total = _online(_unpacked(pairs[i], kind, OPAQUE), largest, total)
        highest, total = tl.reduce((largest, total), 0, _merged)
        word = highest.to(tl.int32, bitcast=True).to(tl.int64) << 32
        word |= (total.to(tl.int32, bitcast=True) + 1).to(tl.int64) & 0xFFFFFFFF  # no sum's bits are all ones
        words_ptr += row * SLOTS
        tl.debug_barrier()  # the logit is read before any gradient is written over it
        tl.atomic_xchg(words_ptr + part, word, sem="relaxed")
        slot = tl.arange(0, SLOTS)
        words = tl.load(words_ptr + slot, mask=slot < SPLIT, other=1, volatile=True)
        while tl.min((words != 0).to(tl.int32), 0) == 0:
            words = tl.load(words_ptr + slot, mask=slot < SPLIT, other=1, volatile=True)
        each = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        sums = (words.to(tl.int32) - 1).to(tl.float32, bitcast=True)
        each = tl.where(slot < SPLIT, each, float("-inf"))
        highest = tl.max(each, 0)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(tl.where(slot < SPLIT, sums * tl.exp2((each - base) * LOG2_E), 0.0), 0)
        high, low = _times_log2e(base)
        factor = scale * tl.exp2(-low) / total
        for i in tl.static_range(PIECES):
            at = start + i * PIECE + _offsets(PIECE)
            p = tl.exp2(_unpacked(pairs[i], kind, OPAQUE) * LOG2_E - high) * factor
            tl.store(out + at, p.to(kind), mask=at < vocab, eviction_policy="evict_first")
        if owns:
            tl.store(losses_ptr + row, base + tl.log(total) - logit)
            tl.debug_barrier()  # one element is written once more, after all others
            if valid:
                of_target = tl.exp2(logit * LOG2_E - high) * factor - scale
                tl.store(out + target, of_target.to(kind))


def parts(vocab: int, config: Any) -> int:
    """The number of programs of `launch_split` that share a row."""
    return int(cdiv(vocab, _block(vocab, config)))


def slots(vocab: int, config: Any) -> int:
    """The number of words per row that `launch_split` takes."""
    return int(next_power_of_2(parts(vocab, config)))


def launch_split(
    logits: Tensor, target: Tensor, losses: Tensor, count: Tensor, words: Tensor, out: Tensor, ignore_index: int,
    config: Any,
) -> None:  # fmt: skip
    """As `launch_both`, for 16-bit logits in rows of pairs; `words` [rows, slots(vocab)] from `count_targets`, used up
    by this launch."""
    rows, vocab = logits.shape
    block, split = _block(vocab, config), parts(vocab, config)
    pairs = logits.view(torch.int32)
    with torch.cuda.device_of(logits):
        launch(
            split_kernel, (rows * split,),
            pairs, logits, target, losses, count, out, words, pairs.stride(0), logits.stride(0), out.stride(0), vocab,
            ignore_index, SPLIT=split, SLOTS=words.shape[1], BLOCK=block,
            PIECES=max(1, block // (512 * config.num_warps)),  # 16 elements per thread
            OPAQUE=logits.is_cuda, num_warps=config.num_warps, maxnreg=config.max_registers,
        )  # fmt: skip
