"""A generated kernel as an op of a stream: what its time depends on goes there and back."""

from __future__ import annotations

import pytest

from flopcast.errors import DataError
from flopcast.kernels.shapes import Call, Operand
from flopcast.roofline.stream.compiled.generated_kernel import GeneratedKernel, kernel_of_call, kernel_of_launch
from flopcast.roofline.stream.compiled.launches import Kind, Launch, Work

KERNEL = GeneratedKernel(
    kind=Kind.LOOPED, bytes_read=300, bytes_written=70, numels=(("x", 8192), ("r0_", 1024)), hint="INNER",
    work=Work(arithmetic=12.5, steps=2.0), ages=((100, 5000), (200, 0)),
)  # fmt: skip


def flat(size: int) -> Operand:
    return Operand((size,), (1,), "uint8")


def call(op: str, args: str) -> Call:
    return Call(op, (flat(100), flat(200)), (flat(70),), args)


def test_a_kernel_is_read_back_from_its_op() -> None:
    assert KERNEL.op == "inductor.looped"
    assert kernel_of_call(call(KERNEL.op, KERNEL.args)) == KERNEL


@pytest.mark.parametrize(
    ("op", "args", "told"),
    [
        ("inductor.knitted", "{}", "no kind of generated kernel"),
        ("inductor.looped", "{}", "numels is missing"),
        ("inductor.looped", "{", "arguments of inductor.looped"),
        ("inductor.looped", KERNEL.args.replace("12.5", "-1"), "work.arithmetic"),
    ],
)
def test_an_op_that_tells_no_kernel_is_refused(op: str, args: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        kernel_of_call(call(op, args))


def test_what_has_no_law_is_refused() -> None:
    with pytest.raises(DataError, match="compile without max-autotune"):
        kernel_of_launch(Launch(Kind.TEMPLATE, "triton_tem_fused_mm_0", 1, 1, work=Work()))
    with pytest.raises(DataError, match="is no generated"):
        kernel_of_launch(Launch(Kind.PRODUCT, "mm", 1, 1))
