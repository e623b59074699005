"""Uneven experts: never faster, all tokens accounted for, what cannot be is refused. Of a real Qwen3-MoE's calls."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Call
from flopcast.roofline.gpu.library.imbalance import with_imbalance
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.step.device_work import describe_ops
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.experts import experts_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.grouped import even_groups, is_grouped, uneven_groups
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

CONFIG, RUN = load_config("qwen3-moe"), Run(batch=4, seq=256)
MOST = 8  # 32 experts, 4 a token


def moe() -> Stream:
    return get_stream(CONFIG, RUN.traced_on("cuda"))


@cache
def products(dtype: str) -> list[Work]:
    """The grouped products of the step, each kind once: two forward, two for inputs, two for weights."""
    found = {work.shape: work for work in describe_ops(moe()) if work is not None and is_grouped(work.variant)}
    works = []
    for shape in found:
        assert isinstance(shape, Call)
        a, b, ends = shape.inputs
        inputs = (replace(a, dtype=dtype), replace(b, dtype=dtype), ends)
        works.append(describe(replace(shape, inputs=inputs, outputs=(replace(shape.outputs[0], dtype=dtype),))))
    return works


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["fp32", "bf16"]), st.floats(1, MOST), st.sampled_from([1, 2, 4]))
def test_an_imbalance_never_speeds_a_product_up_nor_makes_it_longer_than_the_fullest(
    dtype: str, imbalance: float, ranks: int
) -> None:
    assert len(products(dtype)) == 6
    profile = find_profile("nvidia-h200")
    even = Estimate(1.0, 0.1, "measured", "")
    for work in products(dtype):
        found = with_imbalance(work, "torch", "cold", even, profile, imbalance=imbalance, ranks=ranks)
        assert 1.0 <= found.seconds < 1.25 * imbalance
        assert found.sigma >= even.sigma


@given(st.integers(1, 4096), st.integers(1, 128), st.floats(1, 8))
def test_the_groups_share_out_all_rows(rows: int, count: int, imbalance: float) -> None:
    work = products("fp32")[0]
    even = replace(even_groups(work), rows=rows, groups=count)
    uneven = uneven_groups(even, min(imbalance, count))
    assert sum(one.groups for one in uneven) == count
    assert sum(one.rows * one.groups for one in uneven) == pytest.approx(rows * count, abs=count)
    assert uneven[0].rows == pytest.approx(min(imbalance, count) * rows, abs=1)


def test_a_step_whose_fullest_gpu_has_twice_the_rows_takes_longer_than_one_with_a_full_expert() -> None:
    profile = find_profile("nvidia-h200")
    for work in products("bf16"):
        even = Estimate(1.0, 0.1, "measured", "")
        one, several = (
            with_imbalance(work, "torch", "cold", even, profile, imbalance=2.0, ranks=ranks).seconds for ranks in (1, 2)
        )
        assert 1.0 <= one < several <= 2.0


def test_what_no_router_can_do_is_refused() -> None:
    profile = find_profile("nvidia-h200")
    with pytest.raises(UsageError, match=r"imbalance is 8\.5: the fullest expert has 8 times the mean at most"):
        PricedStep(moe(), replace(RUN, imbalance=8.5), profile).forecast()
    dense = get_stream(load_config("qwen3-0.6b"), RUN.traced_on("cuda"))
    with pytest.raises(UsageError, match="no grouped products"):
        PricedStep(dense, replace(RUN, imbalance=2.0), profile).forecast()
    with pytest.raises(UsageError, match=r"imbalance is 0\.5: valid are 1"):
        replace(RUN, imbalance=0.5).check()


def test_the_experts_of_a_step_stand_side_by_side() -> None:
    step = PricedStep(moe(), RUN, find_profile("nvidia-h200"))
    whole, active, *uneven = experts_of(step, CONFIG, lambda *_: None)
    assert whole.name == "32 experts, 4 a token"
    assert active.reason.endswith("--what-if")
    seconds = [one.forecast.device_seconds for one in (whole, *uneven) if one.forecast is not None]
    assert seconds == sorted(seconds)
    assert len(seconds) == 3
    assert [one.forecast.to_json().get("imbalance") for one in (whole, *uneven) if one.forecast] == [None, 2.0, 4.0]
    assert experts_of(step, load_config("qwen3-0.6b"), lambda *_: None) == ()
