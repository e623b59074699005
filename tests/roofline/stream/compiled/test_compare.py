"""The gate's comparison on real texts and on small lists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.compare import call_of, compare
from flopcast.roofline.stream.compiled.launches import Graph, Kind, Launch


def graph(*launches: Launch) -> Graph:
    return Graph("0_forward", (), launches, (), ())


def product(m: int, n: int, k: int, transposed: bool = False) -> Launch:
    right = Operand((k, n), (1, k) if transposed else (n, 1), "bf16")
    return Launch(Kind.PRODUCT, "mm", 2 * (m * k + k * n), 2 * m * n, operands=(Operand((m, k), (k, 1), "bf16"), right))


CAST = Launch(Kind.POINTWISE, "triton_poi_fused__to_copy_0", 400, 200)


def test_a_list_agrees_with_itself_in_any_order_and_cut() -> None:
    launches = (CAST, product(8, 16, 32), product(8, 16, 32, transposed=True))
    comparison = compare([graph(*launches)], [graph(launches[2]), graph(launches[1], launches[0])])
    assert comparison.within(0.0)
    assert comparison.calls == ()
    assert [(row.kind, row.expected.launches) for row in comparison.kinds] == [
        ("pointwise", 1),
        ("product", 2),
        ("all", 3),
    ]


def test_differences_are_told_by_kind_and_by_call() -> None:
    fewer = replace(CAST, bytes_read=300)
    comparison = compare(
        [graph(CAST, CAST, product(8, 16, 32, transposed=True))], [graph(fewer, product(8, 16, 32), product(4, 4, 4))]
    )
    pointwise, products, total = comparison.kinds
    assert pointwise.launches_error == -0.5
    assert pointwise.bytes_error == pytest.approx(500 / 1200 - 1)
    assert (products.expected.launches, products.found.launches, total.found.launches) == (1, 2, 3)
    assert [(row.call, row.expected, row.found) for row in comparison.calls] == [
        ("mm(bf16[4x4], bf16[4x4])", 0, 1),
        ("mm(bf16[8x32], bf16[32x16])", 0, 1),
        ("mm(bf16[8x32], bf16[32x16]/10)", 1, 0),
    ]
    assert comparison.unmatched == 2
    assert not comparison.within(0.5)


def test_a_kind_of_one_side_alone_is_infinitely_off() -> None:
    comparison = compare([graph()], [graph(CAST)])
    assert comparison.kinds[0].launches_error == float("inf")


def test_a_padded_row_is_another_call() -> None:
    padded = Launch(Kind.PRODUCT, "mm", operands=(Operand((8, 50257), (50264, 1), "bf16"),))
    assert call_of(padded) == "mm(bf16[8x50257]+0:50264)"
