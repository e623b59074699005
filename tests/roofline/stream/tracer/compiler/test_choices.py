"""What a GPU would be asked while a step is compiled, answered as recorded steps of an H200 answer it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flopcast.roofline.stream.tracer.compiler.attention import kernel_for
from flopcast.roofline.stream.tracer.compiler.fake_gpu import Card

H200, A100, T4 = (9, 0), (8, 0), (7, 5)
FP32, FP16 = torch.float32, torch.float16
NEW, OLD = 91900, 91000


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ROW = of(8, 1, 197, 1).expand(8, 1, 197, 197)  # ViT's, all places of a row alike


@pytest.mark.parametrize(
    ("query", "key", "mask", "capability", "cudnn", "kernel"),
    [
        (of(8, 16, 256, 128), of(8, 16, 256, 128), of(8, 1, 256, 256), H200, NEW, "cudnn"),
        (of(8, 12, 197, 64), of(8, 12, 197, 64), ROW, H200, NEW, "math"),
        (of(8, 16, 256, 128), of(8, 16, 256, 128), None, H200, OLD, "flash"),
        (of(8, 16, 256, 256), of(8, 16, 256, 256), None, H200, NEW, "flash"),
        (of(8, 16, 256, 128), of(8, 16, 256, 128), of(8, 1, 256, 256), A100, NEW, "efficient"),
        (of(8, 16, 256, 128), of(8, 8, 256, 128), of(8, 1, 256, 256), A100, NEW, "math"),
        (of(8, 16, 256, 64, dtype=FP32), of(8, 16, 256, 64, dtype=FP32), None, H200, NEW, "efficient"),
        (of(8, 16, 256, 64, dtype=FP16), of(8, 16, 256, 64, dtype=FP16), None, T4, NEW, "efficient"),
        (of(16, 256, 64), of(16, 256, 64), None, H200, NEW, "math"),
    ],
)  # fmt: skip
def test_attention_is_the_kernel_that_torch_picks(
    query: torch.Tensor, key: torch.Tensor, mask: Any, capability: tuple[int, int], cudnn: int, kernel: str
) -> None:
    assert kernel_for(query, key, key, mask, capability, cudnn) == kernel


def test_products_are_padded_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import pad_mm

    from flopcast.roofline.stream.tracer.compiler.padding import rule_for

    monkeypatch.setattr(pad_mm, "should_exclude_padding_time", lambda *_: False)
    monkeypatch.setattr(pad_mm, "get_alignment_size", lambda _: 8)
    should_pad = rule_for(Card.of({}))
    assert should_pad(None, of(8192, 768), of(768, 50_257), None)  # GPT-2's logits
    assert not should_pad(None, of(384, 197, 64), of(384, 64, 197), None)  # ViT's attention
    assert not should_pad(None, of(8192, 768, dtype=FP32), of(768, 50_257, dtype=FP32), None)
    # the gradient of GPT-2's token weights, for which the gradient of the logits is copied as it lies, transposed
    assert should_pad(None, of(1024, 50_257).t(), of(1024, 768), None)
    assert not should_pad(None, of(1024, 50_257).t(), of(1024, 512), None)
