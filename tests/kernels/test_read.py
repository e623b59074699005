"""The repeated read: right sums in Triton's interpreter, a reason where triton cannot run."""

from __future__ import annotations

import pytest
import torch

from flopcast.kernels.read import BLOCK, prepare
from flopcast.kernels.references import BackendUnavailable


def test_a_processor_has_no_such_kernel() -> None:
    with pytest.raises(BackendUnavailable, match="triton"):
        prepare(torch.zeros(BLOCK), least_bytes=1, programs=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_sums_on_a_gpu() -> None:
    x = torch.randint(-3, 4, (8 * BLOCK,), device="cuda").float()
    call, _ = prepare(x, least_bytes=4 * BLOCK * 64, programs=8)
    assert call().sum().item() == 8 * x.sum().item()
