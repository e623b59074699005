"""Products of fp8 operands: the reference, in Triton's interpreter, and on a GPU beside torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flopcast.kernels import fp8_matmul as F8
from flopcast.kernels.shapes import Gemm, shape_from_json, shape_to_json
from flopcast.microbench.records.kernel_sources import kernels_of
from flopcast.microbench.sweep.cases import kernel_module
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import parse_variant

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
    error, tolerance = F8.check(F8.prepare("torch", *given)(), F8.reference(*given), k=64)
    assert error <= tolerance
    # sums of 14 bits may be off by what 0.0079 was at k 8,192, others not
    off = torch.ones(2, 2), torch.tensor([[1.009, 1.0], [1.0, 1.0]])
    verdicts = [F8.check(off[1], off[0], k, fast) for k, fast in ((8192, True), (8192, False), (128, True))]
    assert [error <= admitted for error, admitted in verdicts] == [True, False, False]
    with pytest.raises(ValueError, match="torch, triton"):
        F8.prepare("cutlass", *given)
    with pytest.raises(F8.BackendUnavailable, match="Hopper"):
        F8.forward(*given)


def test_the_benchmarks_call_a_product_by_its_shape() -> None:
    shape = Gemm(m=32, n=48, k=64, dtype="fp8", layout="nt")
    by_rows = replace(shape, row_scales=True)
    assert (shape.bytes, shape.flops) == (32 * 64 + 48 * 64 + 2 * 32 * 48, 2 * 32 * 48 * 64)
    assert (shape.key, by_rows.key) == ("gemm/nt/fp8/32x48x64", "gemm/nt/fp8+rows/32x48x64")
    assert shape_from_json(shape_to_json(by_rows)) == by_rows
    assert "row_scales" not in shape_to_json(shape)
    module = kernel_module(shape)
    given = module.operands(shape, "cpu", 1)
    error, tolerance = module.check(
        module.prepare(shape, "torch", given)(), module.reference(given, shape), given, shape
    )
    assert error <= tolerance
    assert [scale.shape for scale in module.operands(by_rows, "cpu")[2:]] == [(32, 1), (48, 1)]
    with pytest.raises(F8.BackendUnavailable, match="Hopper"):
        module.prepare(shape, "triton", given)()
    with pytest.raises(ValueError, match="layout of an fp8 product"):
        module.operands(replace(shape, layout="nn"), "cpu")
    ours, bf16 = (kernels_of(shape_to_json(one), "triton") for one in (shape, replace(shape, dtype="bf16")))
    assert ours != bf16  # of other code: each is measured again when its own changes
    assert describe(by_rows).variant == parse_variant("rows/nt/fp8") != describe(shape).variant


@pytest.mark.parametrize("per_row", [False, True])
def test_scales_give_the_numbers_back(per_row: bool) -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 7.0])[:, None]
    q, scale = F8.quantised(x, per_row)
    assert q.dtype == torch.float8_e4m3fn
    assert scale.shape == ((5, 1) if per_row else (1, 1))
    largest = x.abs().amax(-1, keepdim=True) if per_row else x.abs().max()
    assert ((q.float() * scale - x).abs() <= largest * 2.0**-4).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 128), (1000, 1040, 2064), (16, 4096, 512), (4096, 4096, 4096)])
def test_on_a_gpu_it_is_as_right_as_torchs(m: int, n: int, k: int, per_row: bool, fast: bool) -> None:
    given = operands(m, n, k, per_row, "cuda")
    ref = F8.reference(*given)
    (ours, admitted), (torchs, _) = (
        F8.check(F8.prepare(name, *given, fast)(), ref, k, fast) for name in ("triton", "torch")
    )
    assert ours <= max(admitted, 2 * torchs)
