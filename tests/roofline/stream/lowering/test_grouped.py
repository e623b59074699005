"""Grouped products in fp32 are products one after another: a group's time as often as there are groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopcast.kernels.shapes import Call, Gemm, Operand
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import SurfaceKey


def grouped(rows: int, n: int, k: int, groups: int = 32, dtype: str = "fp32") -> Call:
    return Call(
        "aten._grouped_mm.default",
        (
            Operand((rows, k), (k, 1), dtype),
            Operand((groups, k, n), (k * n, 1, k), dtype),
            Operand((groups,), (1,), "int32"),
        ),
        (Operand((rows, n), (n, 1), dtype),),
        '[{"t":0},{"t":1},{"t":2}]',
    )


def test_a_call_takes_what_its_groups_take() -> None:
    profile = find_profile("nvidia-h200")
    one, few, many = profile.estimate(
        [
            (describe(Gemm(m=1024, n=1536, k=1024, dtype="fp32")), "torch", "cold"),
            (describe(grouped(8 * 1024, 1536, 1024, 8)), "torch", "cold"),
            (describe(grouped(32 * 1024, 1536, 1024)), "torch", "hot"),
        ]
    )
    assert few.seconds == pytest.approx(8 * one.seconds)
    assert many.seconds == pytest.approx(32 * one.seconds), "operands of each group's own are cold"
    assert few.sigma > one.sigma


def test_what_was_measured_is_answered_as_measured() -> None:
    profile = find_profile("nvidia-h200")
    key = SurfaceKey.parse("torch/gemm/grouped/nt/fp32/cold")
    surface = profile.surfaces[key]
    measured = describe(grouped(16_384, 1536, 1024))
    assert measured.features in surface.measured
    (found,) = profile.estimate([(measured, "torch", "cold")])
    assert (found.basis, found.source) == ("measured", str(key))
    without = replace(profile, surfaces={k: s for k, s in profile.surfaces.items() if k.variant.tokens[0] != "grouped"})
    (composed,) = without.estimate([(measured, "torch", "cold")])
    assert composed.source.startswith("32 of torch/gemm/nt/fp32")
    assert composed.seconds == pytest.approx(found.seconds, rel=0.2)


def test_in_bf16_it_is_one_kernel() -> None:
    (found,) = find_profile("nvidia-h200").estimate(
        [(describe(grouped(32_768, 1536, 1024, dtype="bf16")), "torch", "cold")]
    )
    assert " of " not in found.source
