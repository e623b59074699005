"""The products that suites measure: as many as planned, spread as said, hold-out apart, the same on every machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.suites import HOT_BYTES, SuiteCase
from flopcast.roofline.stream.lowering.describe import Work, describe
from studies.suites import gemms as suites_gemms
from studies.suites.gemms import LAYOUTS, MAX_BYTES, MAX_MACS, PLANS, GemmPlan, gemm_cases


def gemms(cases: list[SuiteCase], cache: str = "cold") -> list[Gemm]:
    return [case.shape for case in cases if case.cache == cache and isinstance(case.shape, Gemm)]


def works(count: int) -> list[Work]:
    return [describe(Gemm(m=1024, n=64 * (i + 1), k=512)) for i in range(count)]


@pytest.mark.parametrize("suite", ["quick", "standard", "full"])
def test_a_suite_holds_what_its_plan_says(suite: str) -> None:
    plan = PLANS[suite, "fit"]
    shapes = gemms(gemm_cases(works(plan.stream + 50), plan, "fit"))
    assert len(set(shapes)) == len(shapes)
    drawn = Counter(shape.layout for shape in shapes[plan.stream :])
    assert all(
        drawn[layout] == plan.like_stream + plan.unaligned + plan.half_aligned + plan.random for layout in LAYOUTS
    )
    assert max(s.m * s.n * s.k for s in shapes) <= MAX_MACS
    assert max(s.bytes for s in shapes) <= MAX_BYTES


def test_holdout_is_never_fitted() -> None:
    fit = gemms(gemm_cases(works(60), PLANS["standard", "fit"], "fit"))
    held = gemms(gemm_cases(works(90), PLANS["standard", "holdout"], "holdout", without=fit))
    assert len(held) > 200
    assert not {*fit} & {*held}


def test_a_plan_gives_the_same_cases_each_time() -> None:
    plan = GemmPlan(stream=5, like_stream=4, unaligned=4, random=4, hot=0.5)
    assert gemm_cases(works(9), plan, "fit") == gemm_cases(works(9), plan, "fit")
    assert gemm_cases(works(9), plan, "fit") != gemm_cases(works(9), plan, "holdout")


def test_hot_cases_fit_the_cache_and_are_measured_cold_too() -> None:
    cases = gemm_cases([], GemmPlan(like_stream=100, random=100, hot=0.5), "fit")
    cold, hot = gemms(cases), gemms(cases, "hot")
    assert {*hot} < {*cold}
    assert max(shape.bytes for shape in hot) <= HOT_BYTES
    few = [shape for shape in cold if shape.bytes <= HOT_BYTES]
    assert 0.4 * len(few) < len(hot) < 0.6 * len(few)


def test_kinds_are_what_they_say() -> None:
    """Those like streams are aligned and of all token counts, random ones half aligned and of all sizes, unaligned ones
    one off a multiple of 64 by 1 or 8."""
    like = gemms(gemm_cases([], GemmPlan(like_stream=150), "fit"))
    assert all(size % 64 == 0 or size in suites_gemms.VOCABULARIES for s in like for size in (s.m, s.n, s.k))
    tokens = [s.k if s.layout == "tn" else s.m for s in like]
    assert min(tokens) < 400
    assert max(tokens) > 30_000
    random = gemms(gemm_cases([], GemmPlan(random=150), "fit"))
    aligned = [all(size % 64 == 0 for size in (s.m, s.n, s.k)) for s in random]
    assert 0.4 < sum(aligned) / len(random) < 0.6
    assert min(min(s.m, s.n, s.k) for s in random) < 300
    assert max(max(s.m, s.n, s.k) for s in random) > 14_000
    off = gemms(gemm_cases([], GemmPlan(unaligned=150), "fit"))
    residues = [[size % 64 for size in ((s.m, s.n) if s.layout == "tn" else (s.n, s.k))] for s in off]
    assert all({*both} & {1, 8, 56, 63} for both in residues)
    assert {r for both in residues for r in both} <= {0, 1, 8, 56, 63}
    assert {1, 8, 56, 63} <= {r for both in residues for r in both}


def test_half_aligned_widths_leave_the_other_draws_alone() -> None:
    """What was measured stays of the suite: products off by 2 or 4, and odd vocabularies, are drawn apart."""
    plan = GemmPlan(stream=5, like_stream=20, unaligned=20, random=20, hot=0.5)
    before = gemm_cases(works(9), plan, "fit")
    cases = gemm_cases(works(9), replace(plan, half_aligned=60), "fit")
    assert cases[: len(before)] == before
    off = gemms(cases[len(before) :])
    assert len(off) == 60 * len(LAYOUTS)
    widths = [(s.m, s.n) if s.layout == "tn" else (s.n, s.k) for s in off]
    odd = [both for both in widths if {*both} & {*suites_gemms.ODD_VOCABULARIES}]
    assert 0.1 < len(odd) / len(off) < 0.3
    assert all({size % 64 for size in both} & {2, 4, 60, 62} for both in widths if both not in odd)
