"""Matmul: torch and Triton against a higher-precision reference, exact counts, and the choice of tiles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from flopcast.decode import decode
from flopcast.errors import DataError
from flopcast.kernels import matmul, matmul_configs, matmul_law, matmul_table
from flopcast.kernels.matmul_configs import GLUON, MatmulConfig, is_power_of_2
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
    tma=st.booleans(),
    device=st.sampled_from(["", "NVIDIA H200"]),
    layout=st.sampled_from(["nt", "nn", "tn"]),
)
@settings(max_examples=100, deadline=None)
def test_the_chosen_tile_fits_the_part(
    m: int, n: int, k: int, dtype: str, sm_count: int, capability: tuple[int, int], tma: bool, device: str, layout: str
) -> None:
    tma = tma and dtype == "bf16"
    shape = Gemm(m=m, n=n, k=k, dtype=dtype, layout=layout)
    config = matmul.config_for(shape, sm_count, capability, tma=tma, device=device)
    of_copies = tma and capability == (9, 0)
    assert config.kind == "pointer" or of_copies
    assert config.kind not in GLUON or n % 8 == 0  # they store whole rows of 16 bytes alone
    tile = replace(config, split=1, reduce=False, group_m=8, rate=1.0)
    assert tile in {replace(c, rate=1.0, group_m=8) for c in matmul.candidates(dtype, capability)}
    assert config.shared_bytes(DTYPE_BYTES[dtype]) <= matmul.shared_memory_limit(capability)
    # a part of k has something to do, and the workspace of parts stays small
    assert config.split <= max(1, -(-k // config.block_k))
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    assert config.split <= 1 or tiles * config.split <= 1024


@pytest.mark.parametrize("tma", [False, True])
def test_small_problems_take_small_tiles_or_split_them(tma: bool) -> None:
    large, small = (matmul.config_for(Gemm(m=s, n=s, k=1024), 132, tma=tma) for s in (8192, 512))
    assert large.block_m * large.block_n > small.block_m * small.block_n
    assert large.split == 1
    deep = matmul.config_for(Gemm(m=256, n=256, k=16384, layout="tn"), 132, tma=tma)
    assert (deep.split > 1) == tma


def test_a_key_names_one_configuration() -> None:
    for capability in ((8, 0), (8, 9), (9, 0)):
        for config in (*matmul.candidates("bf16", capability),):
            for split in ({}, {"split": 3}, {"split": 4, "reduce": True}, {"split": 0, "group_m": 16}):
                one = replace(config, rate=1.0, **split)  # type: ignore[arg-type]
                assert matmul_configs.from_key(one.key) == one
    with pytest.raises(ValueError, match="tma/128x256x64"):
        matmul_configs.from_key("tma/128")


def _table(**choices: str) -> matmul_table.Table:
    """A table of nt: "m_n_k" -> key."""
    configs = sorted(set(choices.values()))
    shapes = [[*map(int, place[1:].split("_")), configs.index(key)] for place, key in choices.items()]
    document = {"device": "X", "triton": "3.6.0", "dtype": "bf16", "configs": configs, "shapes": {"nt": shapes}}
    return decode(matmul_table.Table, {"format": 1, **document}, "table.json")


def test_the_table_decides_its_own_shapes_and_the_law_all_others() -> None:
    odd = "tma/64x32x128/w4s6/g2/k1/c1p1"
    table = _table(s4096_4096_4096=odd)

    def chosen(m: int, n: int, k: int, layout: str = "nt") -> str:
        shape = Gemm(m=m, n=n, k=k, layout=layout)
        return matmul_table.choose(shape, 132, (9, 0), tma=True, table=table).key

    assert chosen(4096, 4096, 4096) == odd  # measured: whatever the law says
    fastest = matmul_law.fastest(Gemm(m=8192, n=8192, k=4096), 132, matmul.shared_memory_limit((9, 0)))
    assert chosen(8192, 8192, 4096) == fastest.key != odd
    assert chosen(4096, 4096, 4096, "nn") != odd
    assert matmul_table.choose(Gemm(m=4096, n=4096, k=4096), 132, (9, 0), table=table).kind == "pointer"


def test_the_newest_table_serves_where_the_version_has_none() -> None:
    document = {"format": 1, "device": "X", "dtype": "bf16", "configs": [], "shapes": {}}
    known = [
        decode(matmul_table.Table, {**document, "triton": version}, "table.json")
        for version in ("3.10.0", "3.6.0", "3.9.1")
    ]
    found = [matmul_table.find("X", version, known) for version in ("3.6.0", "3.7.1")]
    assert [table.triton for table in found if table] == ["3.6.0", "3.10.0"]
    assert matmul_table.find("Y", "3.6.0", known) is None
    for wrong, told in (
        ({"format": 2}, "format is 2: valid is 1"),
        ({"configs": ["tma/1"]}, "no matmul configuration: 'tma/1'"),
        ({"shapes": {"nt": [[1, 1, 1, 0]]}}, "beyond the 0 that it lists"),
        ({"shapes": {"xx": []}}, "'xx': valid is one of nt, nn, tn, tt"),
    ):
        with pytest.raises(DataError, match=told):
            decode(matmul_table.Table, {**document, "triton": "3.6.0", **wrong}, "table.json")


def test_the_operation_is_seen_by_fake_tensors_and_flop_counting() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for layout in matmul.LAYOUTS:
        shape = Gemm(m=12, n=20, k=28, layout=layout)
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            a, b = (torch.empty(x.shape, dtype=x.dtype, requires_grad=True) for x in matmul.operands(shape, "cpu"))
            out = matmul.triton_matmul(a, b, layout)
            assert (out.shape, out.dtype) == ((12, 20), torch.bfloat16)
            assert counter.get_total_flops() == shape.flops
            out.sum().backward()
            assert (a.grad is not None and a.grad.shape, b.grad is not None and b.grad.shape) == (a.shape, b.shape)
        assert counter.get_total_flops() == 3 * shape.flops


def test_importing_the_kernels_imports_no_triton_kernels() -> None:
    code = (
        "import sys, flopcast.kernels.matmul, flopcast.kernels.attention;"
        "sys.exit(any('flopcast.kernels.triton' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- On a GPU ---

SIZES = [(1, 1, 1), (17, 129, 33), (128, 128, 64), (1024, 1024, 1024), (1024, 3072, 1000), (4096, 1536, 2049)]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
    @pytest.mark.parametrize("layout", matmul.LAYOUTS)
    def test_agrees_with_the_reference(
        self, at_once: Callable[..., list[torch.Tensor]], dtype: str, layout: str
    ) -> None:
        shapes = [Gemm(m=m, n=n, k=k, dtype=dtype, layout=layout) for m, n, k in SIZES]
        pairs = [matmul.operands(shape, "cuda") for shape in shapes]
        torch.cuda.synchronize()
        tritons = at_once(matmul.prepare(shape, "triton", x) for shape, x in zip(shapes, pairs, strict=True))
        for shape, pair, ours in zip(shapes, pairs, tritons, strict=True):
            for out in (ours, matmul.prepare(shape, "torch", pair)()):
                error, tolerance = matmul.check(out, matmul.reference(pair, shape), pair, shape)
                assert error <= tolerance, shape.key

    @pytest.mark.parametrize("layout", matmul.LAYOUTS)
    @pytest.mark.parametrize("size", [(384, 512, 256), (392, 520, 264), (391, 517, 263)])
    def test_every_configuration_is_exact_on_small_integers(
        self, at_once: Callable[..., list[torch.Tensor]], layout: str, size: tuple[int, int, int]
    ) -> None:
        m, n, k = size
        shape = Gemm(m=m, n=n, k=k, layout=layout)
        # 263 products of at most 1 stay within the 256 that bf16 counts exactly, by far
        a, b = (torch.randint_like(x, -1, 2) for x in matmul.operands(shape, "cuda"))
        exact = matmul.matmul_reference(a, b, layout)
        copied = not any(x.stride(0) % 8 for x in (a, b))
        splits: list[dict[str, Any]] = [{}, {"split": 3}, {"split": 3, "reduce": True}, {"split": 0}]

        def splits_of(config: MatmulConfig) -> list[dict[str, Any]]:
            """Those that a choice may take: other tiles than of powers of 2, and kinds, count on whole ones."""
            if config.kind == "tma":
                return splits if is_power_of_2(config.block_m * config.block_n) else splits[:1]
            return splits[:2] if config.kind in ("pointer", "gluon") else splits[:1]

        configs = [
            replace(config, **split)
            for config in matmul.candidates("bf16", torch.cuda.get_device_capability())
            if config.kind == "pointer" or copied
            for split in splits_of(config)
        ]
        torch.cuda.synchronize()
        outs = at_once(partial(matmul.matmul_triton, a, b, layout, config=config) for config in configs)
        for config, out in zip(configs, outs, strict=True):
            assert torch.equal(out.double(), exact), config

    @pytest.mark.parametrize("n", [151936, 151937])  # the second is stored through pointers
    def test_offsets_beyond_two_to_the_31(self, n: int) -> None:
        shape = Gemm(m=16384, n=n, k=64)
        if torch.cuda.mem_get_info()[0] < 24 << 30:
            pytest.skip("needs 24 GB of free device memory")
        a, b = matmul.operands(shape, "cuda")
        out = matmul.matmul_triton(a, b, "nt")
        tail = Gemm(m=512, n=n, k=64)
        ref = matmul.reference((a[-512:], b), tail)
        assert matmul.check(out[-512:], ref, (a, b), tail)[0] <= matmul.tolerance(tail)

    @pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
    def test_nan_and_infinity_go_where_torchs_go(self, layout: str) -> None:
        shape = Gemm(m=200, n=136, k=392, layout=layout)
        a, b = matmul.operands(shape, "cuda")
        a[3, 5], b[7, 1], b[11, 8] = float("nan"), float("inf"), -float("inf")
        expected = matmul.matmul_torch(a, b, layout)
        for config in (None, matmul_configs.from_key("tma/64x64x128/w4s3/g8/k3/c1p2")):
            if config is not None and torch.cuda.get_device_capability()[0] != 9:
                continue
            out = matmul.matmul_triton(a, b, layout, config=config)
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out.isposinf(), expected.isposinf())
            assert torch.equal(out.isneginf(), expected.isneginf())

    def test_split_products_are_the_same_from_run_to_run(self) -> None:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs sm_90")
        shape = Gemm(m=1024, n=1024, k=4096, layout="tn")
        a, b = matmul.operands(shape, "cuda")
        for share in ("stream", "k3", "k8", "k8r"):
            config = matmul_configs.from_key(f"tma/128x128x64/w8s6/g8/{share}/c1p1")
            first = matmul.matmul_triton(a, b, "tn", config=config)
            for _ in range(20):
                assert torch.equal(matmul.matmul_triton(a, b, "tn", config=config), first), share

    def test_the_operation_differentiates_and_compiles(self) -> None:
        shape = Gemm(m=136, n=200, k=72)
        pair = [x.requires_grad_() for x in matmul.operands(shape, "cuda")]
        g = torch.randn(136, 200, device="cuda", dtype=torch.bfloat16)
        wanted = torch.autograd.grad(matmul.matmul_torch(*pair, "nt"), pair, g)
        for function in (matmul.triton_matmul, torch.compile(matmul.triton_matmul, fullgraph=True)):
            found = torch.autograd.grad(function(*pair, "nt"), pair, g)
            for mine, theirs in zip(found, wanted, strict=True):
                assert torch.allclose(mine.float(), theirs.float(), rtol=2e-2, atol=0.1)

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
