"""Attention of the suites: what is drawn runs on a GPU in milliseconds, nothing of the fit judges it."""

from collections import Counter
from dataclasses import replace
from typing import cast

import pytest

from flopcast.kernels.attention_blocks import is_banded
from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.suites import HOT_BYTES, SuiteCase
from studies.suites.attention import (
    CUDA_GRID,
    CUDA_GRID_HOLDOUT,
    PLANS,
    AttentionPlan,
    attention_cases,
    banded_cases,
    directions,
    head_cases,
    triton_cases,
)

BACKENDS = ("sdpa-cudnn", "sdpa-flash")


def shapes(cases: list[SuiteCase]) -> list[Attention]:
    return [cast(Attention, case.shape) for case in cases]


@pytest.mark.parametrize("name", ["standard", "full"])
def test_no_call_of_the_fit_judges_it(name: str) -> None:
    fit = attention_cases(CUDA_GRID, PLANS[name, "fit"], "fit", BACKENDS)
    held = attention_cases(CUDA_GRID_HOLDOUT, PLANS[name, "holdout"], "holdout", BACKENDS, set(shapes(fit)))
    assert not set(shapes(fit)) & set(shapes(held))
    for cases, role in ((fit, "fit"), (held, "holdout")):
        assert len(set(cases)) == len(cases)
        assert {case.role for case in cases} == {role}
        counts = Counter((c.backend, s.direction) for c, s in zip(cases, shapes(cases), strict=True))
        assert set(counts.values()) == {len(cases) // 4}


def test_every_mask_and_head_size_is_drawn_as_often_as_planned() -> None:
    plan = AttentionPlan(causal_128=3, full_128=2, causal_64=1, full_64=4)
    found = shapes(attention_cases((), plan, "fit", ["sdpa-flash"]))
    forward = Counter((s.causal, s.head_dim) for s in found if s.direction == "fwd")
    assert forward == {(True, 128): 3, (False, 128): 2, (True, 64): 1, (False, 64): 4}
    assert attention_cases((), plan, "fit", ["sdpa-flash"]) == attention_cases((), plan, "fit", ["sdpa-flash"])


def test_what_is_drawn_is_within_bounds() -> None:
    found = shapes(attention_cases((), AttentionPlan(causal_128=200, full_64=200), "holdout", ["sdpa-flash"]))
    assert max(s.batch * s.seq for s in found) <= 32_768
    assert max(s.heads for s in found) <= 64
    assert max(s.flops for s in found if s.direction == "fwd") <= 1e12
    assert all(s.heads % s.kv_heads == 0 for s in found)
    assert len({s.batch * s.heads for s in found}) > 60  # block counts between powers of two


def test_a_backward_is_its_forwards() -> None:
    forward = Attention(batch=2, heads=6, kv_heads=3, seq=197, head_dim=64, causal=False)
    first, second = directions(forward)
    assert first == forward
    assert (second.direction, second.causal, second.seq) == ("bwd", False, 197)


def test_triton_has_a_suite_that_aims_at_no_step() -> None:
    """Drawn from ranges, none of the ladder's own shapes; cold and hot; nothing of the fit judges it."""
    cases = triton_cases()
    assert suites.load(suites.ATTENTION) == cases
    fit, held = ({c.shape for c in cases if c.role == role} for role in ("fit", "holdout"))
    assert len(fit) > len(held) > 0
    assert not fit & held
    forward = {s for s in shapes(cases) if s.direction == "fwd"}
    ladder = {(b, h, kv, s, d) for b, h, kv, s, d in (*CUDA_GRID, *CUDA_GRID_HOLDOUT)}
    assert not ladder & {(s.batch, s.heads, s.kv_heads, s.seq, s.head_dim) for s in forward}
    assert {(s.head_dim, s.causal) for s in forward} == {(64, True), (64, False), (128, True), (128, False)}
    assert {2, 4, 8, 16, 32} <= {s.heads for s in forward}
    assert {256, 16384} <= {s.seq for s in forward}
    assert all(c.cache == "cold" or c.shape.bytes <= HOT_BYTES / 4 for c in cases)
    assert len({(c.shape, c.cache) for c in cases if c.backend == "triton"}) == len(cases)


def test_windows_and_documents_of_the_suite_are_few_kernels_and_judged_apart() -> None:
    cases = banded_cases()
    assert suites.load(suites.BANDS) == cases
    fit, held = ({c.shape for c in cases if c.role == role} for role in ("fit", "holdout"))
    assert (len(fit), len(held), len(cases)) == (64, 28, 92)
    assert not fit & held
    found = shapes(cases)
    assert all(is_banded(shape) and shape.causal and shape.window < shape.seq for shape in found)
    assert {shape.window for shape in fit} == {0, 128, 1024, 4096}  # type: ignore[union-attr]
    assert 512 in {shape.window for shape in held}  # type: ignore[union-attr]
    assert any(shape.window and shape.documents for shape in found)
    # each forward has its backward, and a window and its whole triangle compare
    assert all(replace(shape, direction="bwd") in found for shape in found)


def test_other_heads_are_of_published_models_and_judged_apart() -> None:
    cases = head_cases()
    assert suites.load(suites.HEADS) == cases
    fit, held = ({c.shape for c in cases if c.role == role} for role in ("fit", "holdout"))
    assert not fit & held
    single = [case for case in cases if cast(Attention, case.shape).dtype == "fp32"]
    narrow = [case for case in cases if cast(Attention, case.shape).value_dim]
    usual = [case for case in cases if case not in {*single, *narrow}]
    assert {s.head_dim for s in shapes(usual)} == {80, 96, 192, 256}
    assert {case.backend for case in narrow} == {"sdpa-cudnn"}
    assert {s.columns for s in shapes(narrow)} == {(192, 128)}
    assert {case.backend for case in single} == {"sdpa-efficient"}
    assert {s.columns for s in shapes(single)} == {(64, 64), (128, 128)}
    assert all(s.heads == s.kv_heads for s in shapes([*narrow, *single])), "which takes no heads in groups"
    for own in (fit, held):
        for others in (narrow, single):
            by_mask = Counter((s.direction, s.causal) for s in shapes(others) if s in own)
            assert len(by_mask) == 4
            assert by_mask["fwd", True] == by_mask["bwd", True] > by_mask["fwd", False] == by_mask["bwd", False]
        counts = Counter((c.backend, s.direction) for c, s in zip(usual, shapes(usual), strict=True) if c.shape in own)
        assert set(counts) == {(backend, direction) for backend in BACKENDS for direction in ("fwd", "bwd")}
        assert len(set(counts.values())) == 1
