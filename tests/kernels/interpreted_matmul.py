"""The Triton matmul in Triton's interpreter, on the CPU; run by test_matmul.py in a process of its own.

fp16 and fp32 only: the interpreter's tl.dot multiplies bf16 as raw bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopcast.kernels import triton_matmul_tma
from flopcast.kernels.matmul import (
    LAYOUTS,
    MatmulConfig,
    check,
    matmul_op,
    matmul_reference,
    matmul_torch,
    matmul_triton,
    operands,
    prepare,
    reference,
    tolerance,
    triton_matmul,
)
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.timing import faster_product

SMALL = MatmulConfig(16, 32, 16, 4, 2, group_m=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (32, 64, 32), (37, 70, 53)])
def test_agrees_with_the_reference(layout: str, dtype: str, m: int, n: int, k: int) -> None:
    shape = Gemm(m=m, n=n, k=k, dtype=dtype, layout=layout)
    pair = operands(shape, "cpu")
    error, tolerance = check(matmul_triton(*pair, layout, config=SMALL), reference(pair, shape), pair, shape)
    assert error <= tolerance


def test_both_ways_of_a_product_are_checked_before_they_are_timed() -> None:
    shape = Gemm(m=37, n=70, k=53, dtype="fp16", layout="nt")
    found = faster_product.errors(shape, faster_product.operands_of(shape, torch.device("cpu")), SMALL)
    assert set(found) == {"torch", "triton"}
    assert 0 < max(found.values()) <= tolerance(shape)


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    layout=st.sampled_from(LAYOUTS),
    group=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_small_integers_are_exact(m: int, n: int, k: int, layout: str, group: int, seed: int) -> None:
    """Sums of at most 70 products of at most 9 are exact in fp16: any slip in an index or a mask shows."""
    shape = Gemm(m=m, n=n, k=k, dtype="fp16", layout=layout)
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-3, 4, x.shape, generator=generator).half() for x in operands(shape, "cpu"))
    out = matmul_triton(a, b, layout, config=MatmulConfig(16, 32, 16, 4, 2, group_m=group))
    assert torch.equal(out.double(), matmul_reference(a, b, layout))


TMA = MatmulConfig(16, 32, 16, 4, 2, group_m=2, kind="tma")
SHARES = (
    *((layout, {}) for layout in LAYOUTS),
    ("tn", {"subtiles": 2}),
    ("nt", {"split": 3}),
    ("nn", {"split": 2, "reduce": True}),
    ("tn", {"split": 0}),
    ("nt", {"split": 0, "subtiles": 4}),
)


def _integers(shape: Gemm, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-3, 4, x.shape, generator=generator).half() for x in operands(shape, "cpu"))
    return a, b


@pytest.mark.parametrize(("layout", "share"), SHARES)
def test_tensor_memory_copies_are_exact(layout: str, share: dict[str, Any]) -> None:
    """Odd edges, k of several steps: whole tiles, parts of k and iterations dealt out, summed in one kernel or two."""
    shape = Gemm(m=40, n=72, k=56, dtype="fp16", layout=layout)
    a, b = _integers(shape)
    out = matmul_triton(a, b, layout, config=replace(TMA, **share))
    assert torch.equal(out.double(), matmul_reference(a, b, layout))


@pytest.mark.parametrize(("layout", "block_m", "block_n", "subtiles"), [("nt", 16, 48, 2), ("tn", 48, 16, 1)])
def test_tiles_of_two_blocks_are_exact(layout: str, block_m: int, block_n: int, subtiles: int) -> None:
    """As 128 x 192 is: 128 x 128 and 128 x 64."""
    shape = Gemm(m=40, n=56, k=40, dtype="fp16", layout=layout)
    a, b = _integers(shape)
    config = replace(TMA, block_m=block_m, block_n=block_n, subtiles=subtiles)
    assert torch.equal(matmul_triton(a, b, layout, config=config).double(), matmul_reference(a, b, layout))


def test_stream_k_leaves_full_waves_whole() -> None:
    """With 4 multiprocessors 9 tiles are 5 dealt out by iterations and 4 whole."""
    shape = Gemm(m=48, n=96, k=40, dtype="fp16")
    a, b = _integers(shape)
    config = replace(TMA, split=0)
    assert triton_matmul_tma.shares(config, 9, 3, 4) == (4, 5)
    out = triton_matmul_tma.launch(a, b, "nt", 48, 96, 40, config, 4)
    assert torch.equal(out.double(), matmul_reference(a, b, "nt"))


def test_rows_of_c_that_no_copy_can_store() -> None:
    shape = Gemm(m=24, n=37, k=24, dtype="fp16")
    a, b = _integers(shape)
    for share in ({}, {"split": 2}):
        out = matmul_triton(a, b, "nt", config=replace(TMA, **share))
        assert torch.equal(out.double(), matmul_reference(a, b, "nt"))


def test_operands_that_copies_cannot_read_take_pointers() -> None:
    a, b = _integers(Gemm(m=24, n=40, k=27, dtype="fp16"))
    assert torch.equal(matmul_triton(a, b, "nt").double(), matmul_reference(a, b, "nt"))
    with pytest.raises(ValueError, match="kind 'pointer'"):
        matmul_triton(a, b, "nt", config=TMA)


def test_pointers_split_k() -> None:
    shape = Gemm(m=37, n=45, k=100, dtype="fp16", layout="tn")
    a, b = _integers(shape)
    out = matmul_triton(a, b, "tn", config=replace(SMALL, split=3))
    assert torch.equal(out.double(), matmul_reference(a, b, "tn"))


def test_writes_where_it_is_told() -> None:
    a, b = _integers(Gemm(m=16, n=32, k=16, dtype="fp16"))
    out = torch.full((16, 32), 7.0).half()
    assert matmul_triton(a, b, "nt", config=TMA, out=out) is out
    assert torch.equal(out.double(), matmul_reference(a, b, "nt"))
    with pytest.raises(ValueError, match="contiguous"):
        matmul_triton(a, b, "nt", out=out.T)
    assert torch.equal(matmul_triton(a[:, :0], b[:, :0], "nt"), torch.zeros(16, 32).half())


def test_the_operation_is_registered_in_full() -> None:
    a, b = (torch.randn(12, 10).requires_grad_(), torch.randn(8, 10).requires_grad_())
    torch.library.opcheck(matmul_op.overload, (a, b, "nt", False))
    for layout in LAYOUTS:
        x = a if layout[0] == "n" else a.mT.contiguous().detach().requires_grad_()
        y = b if layout[1] == "t" else b.mT.contiguous().detach().requires_grad_()
        g = torch.randn(12, 8)
        wanted = torch.autograd.grad(matmul_torch(x, y, layout), (x, y), g)
        found = torch.autograd.grad(triton_matmul(x, y, layout), (x, y), g)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)


def test_reads_strided_operands_in_place() -> None:
    # Integers, whose sums are exact: the interpreter's BLAS may add strided tiles in another order.
    a = torch.randint(-4, 5, (40, 3, 24)).half()[:, 1, :]
    b = torch.randint(-4, 5, (56, 48)).half()[:, ::2]
    assert torch.equal(matmul_triton(a, b, "nt").double(), a.double() @ b.double().T)


def test_the_chosen_configuration_runs() -> None:
    shape = Gemm(m=130, n=70, k=90, dtype="fp32")
    pair = operands(shape, "cpu")
    error, tolerance = check(prepare(shape, "triton", pair)(), reference(pair, shape), pair, shape)
    assert error <= tolerance


def test_a_batch_or_bf16_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="backend torch"):
        matmul_triton(torch.ones(2, 4, 4), torch.ones(2, 4, 4), "nn")
    with pytest.raises(NotImplementedError, match="bf16 is wrong"):
        matmul_triton(torch.ones(4, 4).bfloat16(), torch.ones(4, 4).bfloat16(), "nn")
