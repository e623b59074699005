"""The Triton matmul in Triton's interpreter, on the CPU; run by test_matmul.py in a process of its own.

fp16 and fp32 only: the interpreter's tl.dot multiplies bf16 as raw bits.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopcast.kernels.matmul import (
    LAYOUTS,
    MatmulConfig,
    check,
    matmul_reference,
    matmul_triton,
    operands,
    prepare,
    reference,
)
from flopcast.kernels.shapes import Gemm

SMALL = MatmulConfig(16, 32, 16, 4, 2, group_m=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (32, 64, 32), (37, 70, 53)])
def test_agrees_with_the_reference(layout: str, dtype: str, m: int, n: int, k: int) -> None:
    shape = Gemm(m=m, n=n, k=k, dtype=dtype, layout=layout)
    pair = operands(shape, "cpu")
    error, tolerance = check(matmul_triton(*pair, layout, config=SMALL), reference(pair, shape), pair, shape)
    assert error <= tolerance


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


def test_reads_strided_operands_in_place() -> None:
    a = torch.randn(40, 3, 24).half()[:, 1, :]
    b = torch.randn(56, 48).half()[:, ::2]
    assert torch.equal(matmul_triton(a, b, "nt"), matmul_triton(a.contiguous(), b.contiguous(), "nt"))


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
