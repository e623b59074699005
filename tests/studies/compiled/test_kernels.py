"""What the judge of today's laws takes a launch for."""

from __future__ import annotations

import pytest

from flopcast.kernels.shapes import Attention, Call, Gemm, Operand
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.compiled.launches import Kind, Launch
from flopcast.roofline.stream.compiled.profiled import TimedLaunch
from studies.compiled import kernels


def generated(kind: Kind, read: int, written: int, hint: str = "", **numels: int) -> Launch:
    return Launch(kind, "triton_x_fused_0", read, written, tuple(numels.items()), hint)


def test_products_and_attention_are_what_they_are() -> None:
    a, b = Operand((64, 128), (1, 64), "bf16"), Operand((128, 32), (32, 1), "bf16")
    bias = Operand((32,), (1,), "bf16")
    for name, operands in (("mm", (a, b)), ("addmm", (bias, a, b))):
        launch = Launch(Kind.PRODUCT, name, operands=operands)
        assert kernels.stand_in(launch) == (Gemm(m=64, n=32, k=128, layout="tn"), 1.0)
    query, key = Operand((2, 8, 64, 128), (65536, 8192, 128, 1), "bf16"), Operand((2, 4, 64, 128), (1, 1, 1, 1), "bf16")
    found = kernels.stand_in(Launch(Kind.ATTENTION_BACKWARD, "aten.x_backward", operands=(query, query, key, key)))
    assert found is not None
    assert found[0] == Attention(batch=2, heads=8, kv_heads=4, seq=64, head_dim=128, causal=False, direction="bwd")


@pytest.mark.parametrize(
    ("launch", "call"),
    [
        (generated(Kind.POINTWISE, 8000, 4000, x=1000), "aten.add.Tensor"),
        (generated(Kind.PERSISTENT, 8000, 8000, x=10, r0_=100), "aten.native_layer_norm.default"),
        (generated(Kind.LOOPED, 8000, 80, "INNER", x=10, r0_=100), "aten.sum.dim_IntList"),
        (generated(Kind.SPLIT, 8000, 80, "OUTER", x=10, r0_=100), "aten.sum.dim_IntList"),
        (generated(Kind.LOOPED, 800000, 800000, "INNER", x=10, r0_=151936), "aten._log_softmax.default"),
        (generated(Kind.MIXED, 8000, 80, x=10, r0_=100), "aten.native_layer_norm.default"),
        (generated(Kind.SCATTER, 8000, 4000, x=1000), "aten.embedding_dense_backward.default"),
    ],
)
def test_generated_kernels_have_a_call_of_as_many_bytes(launch: Launch, call: str) -> None:
    found = kernels.stand_in(launch)
    assert found is not None
    shape, factor = found
    assert isinstance(shape, Call)
    assert shape.op == call
    assert shape.bytes * factor == pytest.approx(launch.bytes)


def test_a_launch_without_a_stand_in_is_counted_and_not_judged() -> None:
    profile = find_profile("H200")
    timed = [
        TimedLaunch(generated(Kind.POINTWISE, 8_000_000, 4_000_000, x=1_000_000), (("triton_x_fused_0", 5e-6),)),
        TimedLaunch(Launch(Kind.CONVOLUTION, "convolution"), (("cudnn", 1e-5),)),
    ]
    rows = kernels.judge("case", timed, profile)
    assert rows[0].predicted is not None
    assert 1e-6 < rows[0].predicted < 2e-5
    assert rows[1].predicted is None
    text = kernels.report(rows, "nvidia-h200")
    assert "| convolution | 0 |" in text
    assert text.splitlines()[-1].endswith("| 1 |")
