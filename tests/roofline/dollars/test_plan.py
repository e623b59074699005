"""Budget questions: days and dollars of a run, and the largest model of a budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.roofline.dollars.curves import cost_curves
from flopcast.roofline.dollars.plan import BUDGET, LADDER, MEMORY, NOTHING, cheapest, largest_models, plans
from flopcast.roofline.dollars.points import CostCurve, StepPoint, cost_curve
from flopcast.roofline.gpu.catalogue.prices import parse_override
from flopcast.roofline.gpu.library.profiles import find_profiles
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.step.questions.largest_batch import largest_batch
from flopcast.roofline.stream.model.models import ladder, load_config
from flopcast.roofline.stream.model.run import Run

GPUS = ("nvidia-h200", "nvidia-l4")
PRICES = {gpu: parse_override(f"{gpu}={usd}") for gpu, usd in zip(GPUS, (4.0, 0.5), strict=True)}
SMALL = ladder((512,))[0]


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    return find_profiles(GPUS)


# --- a run


def test_a_plan_is_its_steps_times_the_forecast(profiles: list[Profile]) -> None:
    for profile, plan in zip(profiles, plans(SMALL, Run(), profiles, PRICES, tokens=1e9), strict=True):
        found = forecast(SMALL, Run(), profile)
        assert plan.steps == 976563  # 1e9 tokens, 1024 a step, the last one not full
        assert plan.seconds is not None
        assert plan.usd is not None
        assert plan.seconds.value == pytest.approx(976563 * found.step_seconds)
        assert plan.seconds.high == pytest.approx(976563 * found.step_seconds_high)
        assert plan.usd.value == pytest.approx(plan.seconds.value / 3600 * PRICES[profile.gpu].usd_per_hour)
        assert plan.mfu == pytest.approx(found.mfu)
        bought = plan.tokens_for(plan.usd.value)
        assert bought is not None
        assert bought.low < bought.value < bought.high
        assert bought.value == pytest.approx(1e9, rel=1e-5)


def test_twenty_tokens_a_parameter_are_the_default(profiles: list[Profile]) -> None:
    (plan,) = plans(SMALL, Run(), profiles[:1], PRICES)
    n_params = plan.to_json()["tokens"] / 20
    assert n_params == forecast(SMALL, Run(), profiles[0]).n_params
    (more,) = plans(SMALL, Run(), profiles[:1], PRICES, tokens_per_parameter=100)
    assert more.tokens == 5 * plan.tokens


def test_a_model_that_does_not_fit_says_so(profiles: list[Profile]) -> None:
    l4 = plans(load_config("qwen3-4b"), Run(), profiles, PRICES)[1]
    assert (l4.point, l4.usd, l4.reason) == (None, None, "out of memory")
    assert l4.to_json()["days"] is None
    best = cheapest([l4])
    assert best is None


def test_the_largest_batch_that_fits_is_found(tiny: dict[str, Any], profiles: list[Profile]) -> None:
    small = replace(profiles[0], device={**profiles[0].device, "memory_bytes": 760_000_000})
    run = Run(batch=1, seq=32)
    (plan,) = plans(tiny, run, [small], PRICES, auto_batch=True)
    assert plan.run.batch == largest_batch(tiny, run, small) > 8
    assert plan.point is not None
    assert plan.point.step.tokens == plan.run.batch * 32
    none = replace(small, device={**small.device, "memory_bytes": 10**6})
    (plan,) = plans(tiny, run, [none], PRICES, auto_batch=True)
    assert (plan.run.batch, plan.reason, plan.to_json()["batch"]) == (0, "out of memory", None)


def test_the_cheapest_names_those_that_may_be_cheaper(profiles: list[Profile]) -> None:
    found = plans(SMALL, Run(), profiles, {**PRICES, "nvidia-h200": parse_override("nvidia-h200=0.001")})
    best = cheapest(found)
    assert best is not None
    assert (best[0].gpu, best[1]) == ("nvidia-h200", ())
    usd = [plan.usd for plan in found]
    assert usd[0] is not None
    assert usd[1] is not None
    even = parse_override(f"nvidia-h200={0.001 * usd[1].value / usd[0].value:.6f}")
    best = cheapest(plans(SMALL, Run(), profiles, {**PRICES, "nvidia-h200": even}))
    assert best is not None
    assert len(best[1]) == 1


def test_no_tokens_are_no_plan(profiles: list[Profile]) -> None:
    with pytest.raises(UsageError, match="tokens is 0"):
        plans(SMALL, Run(), profiles, PRICES, tokens=0)


# --- a budget

SIZES = (1e8, 2e8, 4e8, 8e8)


def curve(seconds: list[float], usd: float = 3.6, error: float = 1.2, fits: int = 4) -> CostCurve:
    steps = [
        StepPoint(n_params=int(n), step_seconds=s, low=s / error, high=s * error, flops_counted=1e12, tokens=1000,
                  fits=i < fits)
        for i, (n, s) in enumerate(zip(SIZES, seconds, strict=True))
    ]  # fmt: skip
    return cost_curve("nvidia-l4", steps, parse_override(f"nvidia-l4={usd}"))


# seconds in proportion to size: 20 tokens a parameter cost 20 n / 1000 steps of s at $0.001 a second
STRAIGHT = [0.1, 0.2, 0.4, 0.8]


def test_a_budget_reaches_where_its_dollars_end() -> None:
    """1e8 parameters: 2e9 tokens, 2e6 steps of 0.1 s, $200; four times that for twice the size."""
    (row,) = largest_models([curve(STRAIGHT)], 3200.0)
    assert row.limited_by == BUDGET
    assert row.n_params == pytest.approx(4e8)
    assert row.low == pytest.approx(4e8 / 1.2**0.5)
    assert row.high == pytest.approx(4e8 * 1.2**0.5)
    assert row.days == pytest.approx(3200 / 3.6 / 24)
    (fewer,) = largest_models([curve(STRAIGHT)], 3200.0, tokens_per_parameter=80)
    assert fewer.n_params == pytest.approx(2e8)


def test_what_limits_it_is_named() -> None:
    (row,) = largest_models([curve(STRAIGHT)], 1e9)
    assert (row.limited_by, row.n_params, row.cost_usd) == (LADDER, 8e8, pytest.approx(12_800))
    (row,) = largest_models([curve(STRAIGHT, fits=2)], 1e9)
    assert (row.limited_by, row.n_params, row.cost_usd) == (MEMORY, 2e8, pytest.approx(800))
    (row,) = largest_models([curve(STRAIGHT)], 100.0)
    assert (row.limited_by, row.n_params) == (NOTHING, None)
    (row,) = largest_models([curve(STRAIGHT)], 210.0)
    assert row.low is None  # 20% dearer, and the smallest is out of reach
    with pytest.raises(UsageError, match="budget-usd is -1"):
        largest_models([curve(STRAIGHT)], -1.0)


@given(st.lists(st.floats(0.01, 10), min_size=4, max_size=4), st.floats(1, 1e5), st.floats(1.01, 10))
def test_more_dollars_never_train_less(seconds: list[float], usd: float, more: float) -> None:
    poor, rich = (largest_models([curve(seconds)], budget)[0].n_params or 0.0 for budget in (usd, usd * more))
    assert poor <= rich * (1 + 1e-9)


def test_the_ladder_itself_is_dearer_the_larger(profiles: list[Profile]) -> None:
    curves = cost_curves(profiles[:1], ladder((256, 512, 1024)), Run(), PRICES)
    sizes = [largest_models(curves, usd)[0].n_params or 0.0 for usd in (5.0, 20.0, 80.0)]
    assert all(a < b for a, b in pairwise(sizes))
    priced = [replace(curves[0], price=PRICES["nvidia-h200"])]
    assert largest_models(priced, 20.0)[0].n_params == sizes[1]
