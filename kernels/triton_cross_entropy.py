# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Cross-entropy over a large vocabulary in Triton. Imports triton: import this module inside functions only.

One program per row. Maximum and sum of exponentials are computed online, per lane: a lane is VEC = 8 neighbouring
elements, one 16-byte load of bf16, whose maximum costs one further exponential for all eight (rescaling per element
would need two exponentials per element, 18 per cycle at full bandwidth, where the special-function units give 16).
Lanes meet once, at the end of the row. `both_kernel` then reads its row again, partly from the L2 (304 KB per row in
bf16: 40 MB on 132 multiprocessors), and writes the gradient; `split_kernel` keeps it in registers. Both may write over
the logits.

A target that is neither ignored nor in [0, vocab) makes the loss NaN; torch aborts there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopcast.kernels.launching import launch
from flopcast.kernels.sizes import cdiv, next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)
VEC = tl.constexpr(8)


@triton.jit
def _offsets(BLOCK: tl.constexpr):
    """The offsets [BLOCK / VEC, VEC] of a block, one lane per row."""
    return tl.arange(0, BLOCK // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def _online(x, largest, total):
    """Maximum and sum of exponentials of every lane with one more block; exp2(x c - m c) is one FMA per element."""
    now = tl.maximum(largest, tl.max(x, 1))
    base = tl.where(now == float("-inf"), 0.0, now) * LOG2_E  # a lane of -inf so far counts nothing
    total = total * tl.exp2(largest * LOG2_E - base)
    total += tl.sum(tl.exp2(x * LOG2_E - base[:, None]), 1)
    return now, total


@triton.jit
def _log_sum_exp(row_ptr, vocab, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """(base, sum) of a row, fp32: its log-sum-exp is base + log(sum). NaN with a NaN or +inf in it; of a row of -inf
    the sum is 0."""
    offsets = _offsets(BLOCK)
    largest = tl.full((BLOCK // VEC,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK // VEC,), dtype=tl.float32)
    whole = vocab // BLOCK * BLOCK  # without a mask: with one, 12 instructions per element instead of 7
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        x = tl.load(row_ptr + start + offsets, eviction_policy="evict_last").to(tl.float32)
        largest, total = _online(x, largest, total)
    if whole < vocab:
        at = whole + offsets
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"), eviction_policy="evict_last")
        largest, total = _online(x.to(tl.float32), largest, total)
    highest = tl.max(largest, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = total * tl.exp2((largest - base) * LOG2_E)
    return base, tl.sum(total, 0)


@triton.jit
def _times_log2e(x):
    """(high, low): x log2(e) to twice the precision; low goes into a factor of the row: elements cost no more."""
    high = x * LOG2_E
    return high, tl.fma(x, LOG2_E, -high)


@triton.jit
def _logit(row_ptr, target, vocab):
    inside = (target >= 0) & (target < vocab)
    return tl.load(row_ptr + target, mask=inside, other=float("nan")).to(tl.float32)


@triton.jit
def _gradient_block(
    row_ptr, out_ptr, start, target, high, factor, scale, vocab, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """exp2(x log2(e) - high) factor, which is softmax scale, and, with ONE, the target's -scale too."""
    at = start + _offsets(BLOCK)
    if MASKED:
        x = tl.load(row_ptr + at, mask=at < vocab, other=0.0, eviction_policy="evict_first").to(tl.float32)
    else:
        x = tl.load(row_ptr + at, eviction_policy="evict_first").to(tl.float32)
    p = tl.exp2(x * LOG2_E - high) * factor
    if ONE:
        p = tl.where(at == target, p - scale, p)
    out = p.to(out_ptr.dtype.element_ty)
    if MASKED:
        tl.store(out_ptr + at, out, mask=at < vocab, eviction_policy="evict_first")
    else:
        tl.store(out_ptr + at, out, eviction_policy="evict_first")


@triton.jit
def forward_kernel(
    logits_ptr, target_ptr, losses_ptr, lse_ptr, stride, vocab, ignore_index, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    row_ptr = logits_ptr + row * stride
    loss = 0.0
    lse = 0.0
    if target != ignore_index:
        base, total = _log_sum_exp(row_ptr, vocab, BLOCK, STAGES)
        lse = base + tl.log(total)
        loss = lse - _logit(row_ptr, target, vocab)
    tl.store(losses_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit
def backward_kernel(
    dloss_ptr, logits_ptr, target_ptr, lse_ptr, count_ptr, out_ptr, stride, out_stride, vocab, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row per program; the row number varies slowest. Ignored rows become zero and are not read."""
    blocks = tl.cdiv(vocab, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK
    target = tl.load(target_ptr + row)
    out = out_ptr + row * out_stride
    if target == ignore_index:
        at = start + _offsets(BLOCK)
        tl.store(out + at, tl.zeros((BLOCK // VEC, VEC), out_ptr.dtype.element_ty), mask=at < vocab)
    else:
        scale = tl.load(dloss_ptr).to(tl.float32) / tl.load(count_ptr)
        high, low = _times_log2e(tl.load(lse_ptr + row))
        factor = scale * tl.exp2(-low)
        column = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)  # half the compares' work
        row_ptr = logits_ptr + row * stride
        if start + BLOCK <= vocab:
            _gradient_block(row_ptr, out, start, column, high, factor, scale, vocab, BLOCK, False, True)
        else:
            _gradient_block(row_ptr, out, start, column, high, factor, scale, vocab, BLOCK, True, True)


@triton.jit
def both_kernel(
    logits_ptr, target_ptr, losses_ptr, count_ptr, out_ptr, rows, stride, out_stride, vocab, ignore_index,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent, so that the number of programs bounds the rows that the L2 has to hold."""
    scale = 1.0 / tl.load(count_ptr)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        target = tl.load(target_ptr + i)
        row_ptr = logits_ptr + tl.cast(i, tl.int64) * stride
        out = out_ptr + tl.cast(i, tl.int64) * out_stride
        loss = 0.0
        if target == ignore_index:
            for start in range(0, vocab, BLOCK):
                at = start + _offsets(BLOCK)
                tl.store(out + at, tl.zeros((BLOCK // VEC, VEC), out_ptr.dtype.element_ty), mask=at < vocab)
        else:
            base, total = _log_sum_exp(row_ptr, vocab, BLOCK, STAGES)
            logit = _logit(row_ptr, target, vocab)
            loss = base + tl.log(total) - logit
            high, low = _times_log2e(base)
            factor = scale * tl.exp2(-low) / total
            tl.debug_barrier()  # all read the target's logit before one writes the gradient over it
            # Last block first: what was read last is the likeliest to be in the L2 still.
            whole = vocab // BLOCK
            if whole * BLOCK < vocab:
                _gradient_block(row_ptr, out, whole * BLOCK, 0, high, factor, scale, vocab, BLOCK, True, False)
            for j in tl.range(0, whole, num_stages=STAGES):
                start = (whole - 1 - j) * BLOCK
                _gradient_block(row_ptr, out, start, 0, high, factor, scale, vocab, BLOCK, False, False)
            tl.debug_barrier()  # one element is written once more, after all others
            if (target >= 0) & (target < vocab):
                p = tl.exp2(logit * LOG2_E - high) * factor - scale
                tl.store(out + target, p.to(out_ptr.dtype.element_ty))
        tl.store(losses_ptr + i, loss)


@triton.jit
def _divisor(target_ptr, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """How many targets are not ignored, in fp32 (exact up to 2^24); 1 for a sum."""
    if MEAN:
        total = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, rows, BLOCK):
            at = start + tl.arange(0, BLOCK)
            target = tl.load(target_ptr + at, mask=at < rows, other=ignore_index)
            total += (target != ignore_index).to(tl.int32)
        divisor = tl.sum(total, 0).to(tl.float32)
    else:
        divisor = 1.0
    return divisor


@triton.jit
def _sum(losses_ptr, rows, BLOCK: tl.constexpr):
    """The sum of the losses, in one fixed order."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + at, mask=at < rows, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def count_kernel(target_ptr, count_ptr, words_ptr, rows, numel, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The first program writes the divisor to count[0], each of the others zeros to one block of words[numel]."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(count_ptr, _divisor(target_ptr, rows, ignore_index, MEAN, BLOCK))
    else:
        at = (program - 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(words_ptr + at, tl.zeros((BLOCK,), tl.int64), mask=at < numel)


@triton.jit
def mean_kernel(losses_ptr, count_ptr, out_ptr, rows, BLOCK: tl.constexpr):
    """out = the sum of the losses over count; NaN when all are ignored, as in torch."""
    tl.store(out_ptr, _sum(losses_ptr, rows, BLOCK) / tl.load(count_ptr))


@triton.jit
def count_and_mean_kernel(
    losses_ptr, target_ptr, count_ptr, out_ptr, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """As `mean_kernel`, and writes the divisor to count[0]: for losses that were made without it."""
    divisor = _divisor(target_ptr, rows, ignore_index, MEAN, BLOCK)
    tl.store(count_ptr, divisor)
    tl.store(out_ptr, _sum(losses_ptr, rows, BLOCK) / divisor)


@triton.jit
def scale_kernel(x_ptr, factor_ptr, numel, BLOCK: tl.constexpr):
    """x *= factor, over a persistent grid; nothing is read or written when the factor is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < numel:
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
            tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=at < numel)
            start += step


def _block(vocab: int, config: Any) -> int:
    return int(min(config.block, max(8, next_power_of_2(vocab))))


def count_targets(target: Tensor, ignore_index: int, mean: bool, slots: int = 0) -> tuple[Tensor, Tensor]:
    """(the divisor of the sum of losses, fp32 [1]: how many targets are not ignored, or 1; zeros int64 [rows, slots],
    through which `split_kernel` talks)."""
    count = torch.empty(1, dtype=torch.float32, device=target.device)
    words = torch.empty((target.numel(), slots), dtype=torch.int64, device=target.device)
    block = 4096  # 8,192 targets by blocks of 1,024 took eight latencies of 1 us
    with torch.cuda.device_of(target):
        launch(
            count_kernel, (1 + cdiv(words.numel(), block),),
            target, count, words, target.numel(), words.numel(), ignore_index, MEAN=mean, BLOCK=block, num_warps=16,
        )  # fmt: skip
    return count, words


def mean(losses: Tensor, count: Tensor) -> Tensor:
    """The sum of the losses divided by count, an fp32 scalar."""
    out = torch.empty((), dtype=torch.float32, device=losses.device)
    with torch.cuda.device_of(losses):
        launch(mean_kernel, (1,), losses, count, out, losses.numel(), BLOCK=4096, num_warps=16)
    return out


def count_and_mean(losses: Tensor, target: Tensor, ignore_index: int, mean: bool) -> tuple[Tensor, Tensor]:
    """(the sum of the losses over the divisor, an fp32 scalar; the divisor, as `count_targets` gives it)."""
    out = torch.empty((), dtype=torch.float32, device=losses.device)
    count = torch.empty(1, dtype=torch.float32, device=losses.device)
    with torch.cuda.device_of(losses):
        launch(
            count_and_mean_kernel, (1,),
            losses, target, count, out, losses.numel(), ignore_index, MEAN=mean, BLOCK=4096, num_warps=16,
        )  # fmt: skip
    return out, count


def launch_forward(logits: Tensor, target: Tensor, losses: Tensor, lse: Tensor, ignore_index: int, config: Any) -> None:
    rows, vocab = logits.shape
    with torch.cuda.device_of(logits):
        launch(
            forward_kernel, (rows,),
            logits, target, losses, lse, logits.stride(0), vocab, ignore_index,
            BLOCK=_block(vocab, config), STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip


def launch_backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, out: Tensor,
    ignore_index: int, config: Any,
) -> None:  # fmt: skip
    rows, vocab = logits.shape
    block = _block(vocab, config)
    with torch.cuda.device_of(logits):
        launch(
            backward_kernel, (rows * cdiv(vocab, block),),
            dloss, logits, target, lse, count, out, logits.stride(0), out.stride(0), vocab, ignore_index,
            BLOCK=block, num_warps=config.num_warps,
        )  # fmt: skip


def launch_both(
    logits: Tensor, target: Tensor, losses: Tensor, count: Tensor, out: Tensor, ignore_index: int,
    multiprocessors: int, config: Any,
) -> None:  # fmt: skip
    """Writes losses [rows] and out = d(sum of losses / count) / d logits; `out` may be `logits`."""
    rows, vocab = logits.shape
    with torch.cuda.device_of(logits):
        launch(
            both_kernel, (min(rows, config.programs_per_sm * multiprocessors),),
            logits, target, losses, count, out, rows, logits.stride(0), out.stride(0), vocab, ignore_index,
            BLOCK=_block(vocab, config), STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip


def scale(x: Tensor, factor: Tensor, programs: int) -> None:
    """x *= factor in place; x contiguous, factor one number on the same device."""
    with torch.cuda.device_of(x):
        launch(scale_kernel, (programs,), x, factor, x.numel(), BLOCK=4096, num_warps=8)
