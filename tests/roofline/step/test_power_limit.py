"""A step's power and its clock: the law solved, known from ceilings, and the same in predict, explain and sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.catalogue import power
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step import power_limit
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.power_limit import NONE, Draw
from flopcast.roofline.step.priced_step import PricedStep, forecast
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.model.models import depth_for, make_config
from flopcast.roofline.stream.model.run import Run

LARGE: dict[str, Any] = {"batch": 8, "seq": 1024, "optimizer": "adamw-fused"}
CONFIG, FUSED = make_config(width=2048, depth=depth_for(2048, "printed")), Run(**LARGE, fused="triton")


@pytest.fixture(scope="module")
def h200() -> Profile:
    return find_profile("nvidia-h200")


def step(profile: Profile, width: int, **options: Any) -> Forecast:
    return forecast(make_config(width=width, depth=depth_for(width, "printed")), Run(**LARGE | options), profile)


@given(joules=st.floats(0.1, 100.0), moved=st.floats(0.0, 30.0), matrix=st.floats(0.01, 0.2), rest=st.floats(0.0, 0.1))
def test_the_clock_that_is_found_draws_the_limit(joules: float, moved: float, matrix: float, rest: float) -> None:
    draw = Draw(700.0, 119.0, joules, moved, matrix)
    seconds = matrix + rest
    clock, longer = draw.clock(seconds), seconds + draw.added_seconds(seconds)
    if 119.0 + (joules + moved) / seconds <= 700.0:
        assert (clock, longer) == (1.0, seconds)
    else:
        assert power_limit.LEAST_CLOCK <= clock <= 1.0
        drawn = 119.0 + (clock * joules + moved) / longer
        assert drawn == pytest.approx(700.0) if clock > power_limit.LEAST_CLOCK else drawn >= 700.0 * (1 - 1e-6)
        assert draw.power(longer).clock_share == pytest.approx(clock)
    assert draw.times(1.1).added_seconds(seconds) >= draw.added_seconds(seconds)


def test_a_few_products_among_bytes_of_the_cache_do_not_stand_still() -> None:
    """Bytes counted at more than the part draws: one product in a hundred took 73 times as long."""
    draw = Draw(700.0, 119.0, matrix_joules=1e-3, byte_joules=1.0, matrix_seconds=1e-5)
    assert draw.added_seconds(1e-3) <= draw.matrix_seconds
    assert draw.power(1e-3).clock_share == power_limit.LEAST_CLOCK


def test_products_without_a_pause_run_at_the_sustained_rate(h200: Profile) -> None:
    """The law's own end: nothing but large products, at their burst's rate, fall to what was measured at the limit."""
    shape = Gemm(m=8192, n=8192, k=8192, dtype="bf16", layout="nt")
    work = describe(shape)
    burst = h200.ceilings["matrix_burst/bf16"].value
    op = TimedOp("forward", "mm", 0.0, work=work, seconds=work.flops / burst, launches=1)
    draw = power_limit.draw_of([op], h200)
    seconds = op.seconds + draw.added_seconds(op.seconds)
    assert work.flops / seconds == pytest.approx(h200.ceilings["matrix_sustained/bf16"].value, rel=1e-6)
    # `power.ENERGY` is the same constant, from the same part
    energy = power_limit.energies(h200)["bf16"]
    assert energy == pytest.approx(power.ENERGY["Hopper"] * 1.98, rel=0.05)


def test_a_step_of_products_is_slower_at_the_limit_and_says_so(h200: Profile) -> None:
    fused, plain = step(h200, 2048, fused="triton"), step(h200, 1024)
    assert fused.power_watts == pytest.approx(700.0)
    assert fused.clock_share < 0.95
    assert fused.step_seconds > fused.device_seconds + fused.power_seconds
    assert fused.power_seconds > 0.05 * fused.step_seconds
    assert (plain.power_seconds, plain.clock_share) == (0.0, 1.0)
    assert 300.0 < plain.power_watts < 700.0
    assert fused.to_json()["power_seconds"] == fused.power_seconds
    json.dumps(fused.to_json())


def test_without_a_limit_no_step_is_slower(h200: Profile) -> None:
    endless = replace(h200, device={**h200.device, "power_limit_w": None})
    limited, unlimited = (
        PricedStep(get_stream(CONFIG, FUSED.traced_on("cuda")), FUSED, profile) for profile in (h200, endless)
    )
    unlimited.__dict__["ops"] = limited.ops  # kernels estimated once: two estimates may round otherwise
    free, bound = unlimited.forecast(), limited.forecast()
    assert free.power_watts == free.power_seconds == 0.0
    assert bound.step_seconds == pytest.approx(free.step_seconds + bound.power_seconds, rel=1e-6)
    assert bound.device_seconds == free.device_seconds  # as a profiler reads it, with pauses


def test_a_step_near_the_limit_may_meet_it(h200: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """How uncertain the power is widens the interval of a step that draws nearly the limit upwards alone."""

    def ends(width: int) -> tuple[float, float]:
        found = step(h200, width)
        return found.step_seconds / found.step_seconds_low, found.step_seconds_high / found.step_seconds

    near, far = ends(2560), ends(512)
    monkeypatch.setattr(power_limit, "SIGMA", 0.0)
    sure, also_sure = ends(2560), ends(512)
    assert near[1] > sure[1] * 1.001
    assert near[0] == pytest.approx(sure[0])
    assert far == pytest.approx(also_sure)


def test_a_projected_part_sustains_what_its_datasheet_says() -> None:
    """Products without a pause end at the sustained rate that the projection has, not below it."""
    projected = find_profile("nvidia-h100-pcie")
    work = describe(Gemm(m=8192, n=8192, k=8192, dtype="bf16", layout="nt"))
    sustained_rate = projected.ceilings["matrix_sustained/bf16"].value
    op = TimedOp(
        "forward", "mm", 0.0, work=work, seconds=work.flops * power_limit.PROJECTED_SHARE / sustained_rate, launches=1
    )
    seconds = op.seconds + power_limit.draw_of([op], projected).added_seconds(op.seconds)
    assert work.flops / seconds == pytest.approx(sustained_rate, rel=1e-6)


def test_older_parts_products_are_at_their_clock_already() -> None:
    projected = find_profile("nvidia-a100-80gb-sxm")
    assert power_limit.energies(projected) == {}
    assert power_limit.draw_of([], projected) is NONE
    assert step(projected, 1024).power_seconds == 0.0
