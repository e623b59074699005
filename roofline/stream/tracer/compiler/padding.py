"""Whether inductor would find a product faster padded, which it times on the GPU while it compiles.

In 16 bits only: in fp32 products do not run on tensor cores, unless in tf32, which has yet to be recorded. Recorded
steps of an H200 pad GPT-2's 50,257 tokens at width 768, forward and backward, and leave the products of ViT's 197
places, which bytes bound; at width 512 and 1,024 tokens one did not pad the gradient of the tokens' weights.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._inductor.fx_passes import pad_mm

from flopcast.roofline.stream.tracer.compiler.asked import PADDED_BY_ANY_HOST_SECONDS
from flopcast.roofline.stream.tracer.compiler.fake_gpu import Card

# Seconds over those at the peak. An H200's products whose rows tensor cores cannot read 16 bytes at a time were
# measured at 6.7 to 10.5 of them, padded ones at 1.4 to 1.6.
_UNALIGNED, _ALIGNED = 7.5, 1.45
# The same of copying an operand that lies transposed into its padding: of 51 million elements 281 to 406 us, by which
# of GPT-2's products at widths of 512 and 768 an H200's steps padded.
_TRANSPOSED = 8.0
_GAIN = 1.1  # that inductor asks for (`is_padded_faster`)
# Besides what only quick hosts pad (`PADDED_BY_ANY_HOST_SECONDS`) no product is sure whose padded form, copies
# included, is less than so many times as quick as inductor asks for: of the gradients of 50,257 tokens' weights, 1.19
# by this rule, H200s padded those of 1,024 and 8,192 tokens and left those of 2,816 and 9,984, which is 4 ms of a step.
_NEAR = 1.25
_BALANCE = 0.5  # of the machine's FLOPs per byte, below which it does not try (`is_mm_compute_bound`)


def rule_for(card: Card, unsure: Callable[[tuple[int, int, int]], None] = lambda _: None) -> Callable[..., bool]:
    """Makes inductor's `_should_pad` for a GPU. `unsure` is told m, k and n of products that are padded here and that
    another host or another run may leave as they are: inductor times them, with what the host takes to launch them."""

    def seconds(flops: float, elements: float, size: int) -> float:
        return max(flops / card.flops_per_second, elements * size / card.bytes_per_second)

    def should_pad(match: Any, mat1: torch.Tensor, mat2: torch.Tensor, _op: Any, _input: Any = None) -> bool:
        size = mat1.element_size()
        if size != 2:
            return False
        *batch, m, k = map(int, mat1.shape)
        n, times, align = int(mat2.shape[-1]), prod(batch), pad_mm.get_alignment_size(mat1)
        balance = card.flops_per_second / card.bytes_per_second
        if m * n * k / (m * k + k * n + m * n) <= _BALANCE * balance:
            return False
        more_m, more_k, more_n = (pad_mm.get_padded_length(length, align) for length in (m, k, n))
        wide_m, wide_k, wide_n = m + more_m, k + more_k, n + more_n
        as_it_is = seconds(_UNALIGNED * 2 * times * m * n * k, times * (m * k + k * n + m * n), size)
        wide = (wide_m * wide_k, wide_k * wide_n)
        padded = seconds(_ALIGNED * 2 * times * wide_m * wide_n * wide_k, times * (sum(wide) + wide_m * wide_n), size)
        for name, operand, more, made in (
            ("mat1", mat1, more_m or more_k, wide[0]), ("mat2", mat2, more_k or more_n, wide[1]),
        ):  # fmt: skip
            if more and not pad_mm.should_exclude_padding_time(match, name):
                copied = seconds(0, times * made + operand.numel(), size)
                padded += copied * (1.0 if operand.is_contiguous() else _TRANSPOSED)
        if as_it_is <= _GAIN * padded:
            return False
        if as_it_is < max(PADDED_BY_ANY_HOST_SECONDS, _NEAR * _GAIN * padded):
            unsure((m, k, n))
        return True

    return should_pad
