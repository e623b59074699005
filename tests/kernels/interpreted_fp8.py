"""The fp8 product in Triton's interpreter, on the CPU; test_fp8.py runs it."""

from __future__ import annotations

import pytest
import torch

from flopcast.kernels import fp8_matmul as F8

SMALL = F8.Fp8Config(32, 16, 16, num_warps=4)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(32, 16, 16), (37, 48, 80), (1, 16, 32)])
def test_agrees_with_fp32_of_the_same_operands(per_row: bool, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m)
    a, b = (
        torch.randn(size, generator=generator) * torch.rand(size[0], 1, generator=generator)
        for size in ((m, k), (n, k))
    )
    operands = [*F8.quantised(a, per_row), *F8.quantised(b, per_row)]
    a8, scale_a, b8, scale_b = operands
    out = F8.forward(a8, b8, scale_a, scale_b, config=SMALL)
    ref = F8.reference(a8, b8, scale_a, scale_b)
    assert torch.allclose(out, ref, rtol=1e-5, atol=1e-6 * float(ref.abs().max()))
    error, tolerance = F8.check(out, ref, k)
    assert error <= tolerance
    assert (ref - a @ b.T).abs().max() <= 0.1 * (a @ b.T).abs().max()  # what 3 bits of mantissa leave


def test_the_operator_is_that_function() -> None:
    a8, scale_a = F8.quantised(torch.randn(16, 32))
    b8, scale_b = F8.quantised(torch.randn(16, 32))
    for fast in (False, True):
        assert torch.equal(F8.scaled_matmul(a8, b8, scale_a, scale_b, fast), F8.forward(a8, b8, scale_a, scale_b, fast))
    with pytest.raises(ValueError, match="one per tensor or one per row"):
        F8.scaled_matmul(a8, b8, scale_a.expand(16, 1), scale_b)
    with pytest.raises(ValueError, match="takes e4m3"):
        F8.scaled_matmul(a8.float(), b8, scale_a, scale_b)
    with pytest.raises(F8.BackendUnavailable, match="multiples of 16"):
        F8.scaled_matmul(a8[:, :24].contiguous(), b8[:, :24].contiguous(), scale_a, scale_b)
