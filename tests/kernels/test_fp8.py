"""Products of fp8 operands: the reference, in Triton's interpreter, and on a GPU beside torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flopcast.kernels import fp8_matmul as F8

CUDA = torch.cuda.is_available()


def operands(
    m: int, n: int, k: int, per_row: bool, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(k)
    a, b = (torch.randn(size, device=device, generator=generator) for size in ((m, k), (n, k)))
    (a8, scale_a), (b8, scale_b) = F8.quantised(a, per_row), F8.quantised(b, per_row)
    return a8, b8, scale_a, scale_b


def test_the_reference_is_torchs_product() -> None:
    given = operands(32, 16, 64, per_row=False)
    error, tolerance = F8.check(F8.prepare("torch", *given)(), F8.reference(*given))
    assert error <= tolerance
    with pytest.raises(ValueError, match="torch, triton"):
        F8.prepare("cutlass", *given)
    with pytest.raises(F8.BackendUnavailable, match="Hopper"):
        F8.forward(*given)


@pytest.mark.parametrize("per_row", [False, True])
def test_scales_give_the_numbers_back(per_row: bool) -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 7.0])[:, None]
    q, scale = F8.quantised(x, per_row)
    assert q.dtype == torch.float8_e4m3fn
    assert scale.shape == ((5, 1) if per_row else (1, 1))
    largest = x.abs().amax(-1, keepdim=True) if per_row else x.abs().max()
    assert ((q.float() * scale - x).abs() <= largest * 2.0**-4).all()


def test_in_the_interpreter(run_interpreted: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    run_interpreted("interpreted_fp8.py")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 128), (1000, 1040, 2064), (16, 4096, 512), (4096, 4096, 4096)])
def test_on_a_gpu_it_is_as_right_as_torchs(m: int, n: int, k: int, per_row: bool, fast: bool) -> None:
    given = operands(m, n, k, per_row, "cuda")
    ref = F8.reference(*given)
    ours, torchs = (F8.check(F8.prepare(name, *given, fast)(), ref)[0] for name in ("triton", "torch"))
    assert ours <= max(F8.TOLERANCE, 2 * torchs)
