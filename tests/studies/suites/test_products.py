"""Products of the suites that set Triton's beside torch's."""

from typing import cast

import pytest

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.suites import SuiteCase
from studies.suites.products import fp8_cases, product_cases


@pytest.mark.parametrize(("name", "cases"), [(suites.PRODUCTS, product_cases()), (suites.FP8, fp8_cases())])
def test_each_product_is_measured_by_both(name: str, cases: list[SuiteCase]) -> None:
    assert set(suites.load(name)) == set(cases)
    by = [{case.shape for case in cases if case.backend == backend} for backend in ("torch", "triton")]
    assert by[0] == by[1]


def test_fp8_has_both_kinds_of_scales_and_a_holdout() -> None:
    fp8 = {cast(Gemm, case.shape): case.role for case in fp8_cases()}
    assert len(fp8) == 160
    assert sum(role == "holdout" for role in fp8.values()) == 40
    assert all(shape.layout == "nt" and shape.n % 16 == shape.k % 16 == 0 for shape in fp8)
    assert sum(shape.row_scales for shape in fp8) == 80
