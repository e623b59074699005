"""Matmul: torch and Triton against a higher-precision reference, exact counts, and the choice of tiles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from flopcast.kernels import matmul
from flopcast.kernels.references import BackendUnavailable
from flopcast.kernels.shapes import DTYPE_BYTES, Gemm

CUDA = torch.cuda.is_available()


@pytest.mark.parametrize("layout", matmul.LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("batch", [1, 3])
def test_torch_agrees_with_the_reference(layout: str, dtype: str, batch: int) -> None:
    shape = Gemm(m=33, n=20, k=70, dtype=dtype, layout=layout, batch=batch)
    pair = matmul.operands(shape, "cpu")
    out = matmul.prepare(shape, "torch", pair)()
    assert out.shape[-2:] == (33, 20)
    assert out.dtype == pair[0].dtype
    error, tolerance = matmul.check(out, matmul.reference(pair, shape), pair, shape)
    assert error <= tolerance
    exact = matmul.matmul_reference(*pair, layout)
    assert matmul.check(matmul.reference(pair, shape), exact, pair, shape)[0] <= 1e-6


def test_the_layouts_are_three_products_of_one_linear_layer() -> None:
    x, w = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64)
    w.requires_grad_()
    y = matmul.matmul_torch(x, w, "nt")
    g = torch.randn(6, 5, dtype=torch.float64)
    dx, dw = torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), g)
    assert torch.allclose(y, torch.nn.functional.linear(x, w))
    assert torch.allclose(matmul.matmul_torch(g, w, "nn"), dx)
    assert torch.allclose(matmul.matmul_torch(g, x, "tn"), dw)


@pytest.mark.parametrize("layout", matmul.LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_flops_and_bytes_match_independent_counts(layout: str, batch: int) -> None:
    shape = Gemm(m=12, n=20, k=28, layout=layout, batch=batch)
    pair = matmul.operands(shape, "cpu")
    with FlopCounterMode(display=False) as counter:
        out = matmul.prepare(shape, "torch", pair)()
    assert counter.get_total_flops() == shape.flops
    assert sum(x.numel() * x.element_size() for x in (*pair, out)) == shape.bytes


def test_the_check_sees_what_it_must() -> None:
    shape = Gemm(m=64, n=64, k=1024)
    a, b = matmul.operands(shape, "cpu")
    ref = matmul.reference((a, b), shape)
    good = matmul.matmul_torch(a, b, "nt")
    lost_term = (ref - a[:, -1:].float() * b[:, -1].float()).bfloat16()
    wrong_tail, nan = good.clone(), good.clone()
    wrong_tail[-1] = 0
    nan[3, 3] = float("nan")
    limit = matmul.tolerance(shape)
    assert matmul.check(good, ref, (a, b), shape)[0] <= limit
    for bad in (lost_term, wrong_tail, nan, good.T, good[:-1]):
        assert matmul.check(bad, ref, (a, b), shape)[0] > limit


def test_operands_depend_on_the_seed_alone() -> None:
    shape = Gemm(m=8, n=8, k=8)
    first, again, other = (matmul.operands(shape, "cpu", seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_bad_requests_say_what_is_valid() -> None:
    pair = (torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(ValueError, match="nt, nn, tn"):
        matmul.matmul_torch(*pair, "rows")
    with pytest.raises(ValueError, match="do not fit"):
        matmul.matmul_torch(torch.ones(4, 5), torch.ones(4, 6), "nt")
    with pytest.raises(ValueError, match="torch, triton"):
        matmul.prepare(Gemm(m=4, n=4, k=4), "cutlass", pair)
    with pytest.raises(ValueError, match="at least 1"):
        matmul.operands(Gemm(m=0, n=4, k=4), "cpu")
    with pytest.raises(ValueError, match="bf16"):
        matmul.operands(Gemm(m=4, n=4, k=4, dtype="fp7"), "cpu")
    with pytest.raises(NotImplementedError, match="backend torch"):
        matmul.prepare(Gemm(m=4, n=4, k=4, batch=2), "triton", pair)
    with pytest.raises(BackendUnavailable, match="CUDA"):
        matmul.prepare(Gemm(m=4, n=4, k=4, dtype="tf32"), "torch", pair)()
    with pytest.raises(BackendUnavailable, match="triton"):
        matmul.matmul_triton(*pair, "nn")


@given(
    m=st.integers(1, 300_000),
    n=st.integers(1, 300_000),
    k=st.integers(1, 20_000),
    dtype=st.sampled_from(["bf16", "fp16", "fp32", "tf32"]),
    sm_count=st.integers(1, 200),
    capability=st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]),
)
@settings(max_examples=100, deadline=None)
def test_the_chosen_tile_fits_the_part(
    m: int, n: int, k: int, dtype: str, sm_count: int, capability: tuple[int, int]
) -> None:
    config = matmul.config_for(Gemm(m=m, n=n, k=k, dtype=dtype), sm_count, capability)
    assert config in matmul.candidates(dtype, capability)
    assert config.shared_bytes(DTYPE_BYTES[dtype]) <= matmul.shared_memory_limit(capability)


def test_small_problems_take_small_tiles() -> None:
    large, small = (matmul.config_for(Gemm(m=s, n=s, k=1024), 132) for s in (8192, 512))
    assert large.block_m * large.block_n > small.block_m * small.block_n


def test_importing_the_kernels_imports_no_triton_kernels() -> None:
    code = (
        "import sys, flopcast.kernels.matmul, flopcast.kernels.attention;"
        "sys.exit(any('flopcast.kernels.triton' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_triton_in_the_interpreter(run_interpreted: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    run_interpreted("interpreted_matmul.py")


# --- On a GPU ---

SIZES = [(1, 1, 1), (17, 129, 33), (128, 128, 64), (1024, 1024, 1024), (1024, 3072, 1000), (4096, 1536, 2049)]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("backend", ["torch", "triton"])
    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
    @pytest.mark.parametrize("layout", matmul.LAYOUTS)
    @pytest.mark.parametrize("size", SIZES)
    def test_agrees_with_the_reference(
        self, backend: str, dtype: str, layout: str, size: tuple[int, int, int]
    ) -> None:
        m, n, k = size
        shape = Gemm(m=m, n=n, k=k, dtype=dtype, layout=layout)
        pair = matmul.operands(shape, "cuda")
        out = matmul.prepare(shape, backend, pair)()
        error, tolerance = matmul.check(out, matmul.reference(pair, shape), pair, shape)
        assert error <= tolerance

    @pytest.mark.parametrize("layout", matmul.LAYOUTS)
    @pytest.mark.parametrize("size", [(384, 512, 256), (391, 517, 263)])
    def test_every_configuration_is_exact_on_small_integers(
        self, layout: str, size: tuple[int, int, int]
    ) -> None:
        m, n, k = size
        shape = Gemm(m=m, n=n, k=k, layout=layout)
        # 263 products of at most 1 stay within the 256 that bf16 counts exactly, by far
        a, b = (torch.randint_like(x, -1, 2) for x in matmul.operands(shape, "cuda"))
        exact = matmul.matmul_reference(a, b, layout)
        for config in matmul.candidates("bf16", torch.cuda.get_device_capability()):
            out = matmul.matmul_triton(a, b, layout, config=config)
            assert torch.equal(out.double(), exact), config

    def test_offsets_beyond_two_to_the_31(self) -> None:
        shape = Gemm(m=16384, n=151936, k=64)
        if torch.cuda.mem_get_info()[0] < 24 << 30:
            pytest.skip("needs 24 GB of free device memory")
        a, b = matmul.operands(shape, "cuda")
        out = matmul.matmul_triton(a, b, "nt")
        tail = Gemm(m=512, n=151936, k=64)
        ref = matmul.reference((a[-512:], b), tail)
        assert matmul.check(out[-512:], ref, (a, b), tail)[0] <= matmul.tolerance(tail)

    @pytest.mark.parametrize("backend", ["torch", "triton"])
    def test_replays_from_a_graph(self, backend: str) -> None:
        shape = Gemm(m=1024, n=768, k=512, layout="tn")
        call = matmul.prepare(shape, backend, matmul.operands(shape, "cuda"))
        eager = call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, eager)

    def test_fp32_precision_is_the_shapes_and_is_restored(self) -> None:
        before = torch.get_float32_matmul_precision()
        exact, rough = (Gemm(m=512, n=512, k=512, dtype=dtype) for dtype in ("fp32", "tf32"))
        pair = matmul.operands(exact, "cuda")
        ref = matmul.reference(pair, exact)
        errors = [matmul.check(matmul.prepare(s, "torch", pair)(), ref, pair, s)[0] for s in (exact, rough)]
        assert errors[0] * 10 < errors[1]
        assert torch.get_float32_matmul_precision() == before
