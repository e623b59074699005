"""Whether inductor would find a product faster padded, which it times on the GPU while it compiles.

In 16 bits only: in fp32 products do not run on tensor cores, unless in tf32, which has yet to be recorded. Recorded
steps of an H200 pad GPT-2's 50,257 tokens, forward and backward, and leave the products of ViT's 197 places, which
bytes bound.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._inductor.fx_passes import pad_mm

from flopcast.roofline.stream.tracer.compiler.fake_gpu import Card

# Odd widths raise the kernel time of whole steps by up to 231% on an H200 (docs/choose-a-width.md), nearly all by the
# products, whose rows tensor cores cannot read 16 bytes at a time.
_UNALIGNED = 3.0
_GAIN = 1.1  # that inductor asks for (`is_padded_faster`)


def rule_for(card: Card) -> Callable[..., bool]:
    """Makes inductor's `_should_pad` for a GPU."""

    def seconds(flops: float, elements: float, size: int) -> float:
        return max(flops / card.flops_per_second, elements * size / card.bytes_per_second)

    def should_pad(match: Any, mat1: torch.Tensor, mat2: torch.Tensor, _op: Any, _input: Any = None) -> bool:
        size = mat1.element_size()
        if size != 2:
            return False
        *batch, m, k = map(int, mat1.shape)
        n, times, align = int(mat2.shape[-1]), prod(batch), pad_mm.get_alignment_size(mat1)
        more_m, more_k, more_n = (pad_mm.get_padded_length(length, align) for length in (m, k, n))
        wide_m, wide_k, wide_n = m + more_m, k + more_k, n + more_n
        as_it_is = seconds(_UNALIGNED * 2 * times * m * n * k, times * (m * k + k * n + m * n), size)
        wide = (wide_m * wide_k, wide_k * wide_n)
        padded = seconds(2 * times * wide_m * wide_n * wide_k, times * (sum(wide) + wide_m * wide_n), size)
        for name, more, own, made in (
            ("mat1", more_m or more_k, m * k, wide[0]), ("mat2", more_k or more_n, k * n, wide[1]),
        ):  # fmt: skip
            if more and not pad_mm.should_exclude_padding_time(match, name):
                padded += seconds(0, times * (own + made), size)
        return as_it_is > _GAIN * padded

    return should_pad
