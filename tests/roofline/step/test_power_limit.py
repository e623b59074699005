"""A step's power and its clock: the law solved, known from ceilings, and the same in predict, explain and sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.gpu.catalogue import power
from flopcast.roofline.gpu.catalogue.power import CLOCKS_OF, OF_PRODUCTS
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step import power_limit
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.power_limit import NONE, Draw, Load
from flopcast.roofline.step.priced_step import PricedStep, forecast
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.model.models import depth_for, make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops import op_stream
from studies.power.steps import PLANS
from studies.power.table import STREAMS

MEASURED = CLOCKS_OF["nvidia-h200"]
LARGE: dict[str, Any] = {"batch": 8, "seq": 1024, "optimizer": "adamw-fused"}
CONFIG, FUSED = make_config(width=2048, depth=depth_for(2048, "printed")), Run(**LARGE, fused="triton")


@pytest.fixture(scope="module")
def h200() -> Profile:
    return find_profile("nvidia-h200")


@pytest.fixture(scope="module")
def generated(h200: Profile) -> TimedOp:
    """The longest generated kernel of a compiled step that an H200 ran: of its loss."""
    stream = op_stream.load(STREAMS / "w2048-d2.json.gz")
    ops = PricedStep(stream, Run(**PLANS["w2048-d2"].settings), h200).ops
    found = [op for op in ops if op.work is not None and op.work.op_class == "generated"]
    return replace(max(found, key=lambda op: op.seconds), count=1)


def step(profile: Profile, width: int, **options: Any) -> Forecast:
    return forecast(make_config(width=width, depth=depth_for(width, "printed")), Run(**LARGE | options), profile)


def loads(*given: tuple[float, float, float]) -> tuple[Load, ...]:
    return tuple(Load(own, joules, seconds) for own, joules, seconds in given)


@given(
    joules=st.floats(0.1, 100.0), moved=st.floats(0.0, 30.0), products=st.floats(0.01, 0.2), rest=st.floats(0.0, 0.1),
    attention=st.floats(0.0, 50.0), generated=st.floats(0.0, 0.05),
)  # fmt: skip
def test_the_clock_that_is_found_draws_the_limit(
    joules: float, moved: float, products: float, rest: float, attention: float, generated: float
) -> None:
    given = loads((1.0, joules, products), (1.04, attention, 0.02), (MEASURED.highest, 0.0, generated))
    draw = Draw(700.0, 119.0, moved, given, MEASURED)
    seconds = products + 0.02 + generated + rest
    clock, added = draw.clock(seconds), draw.added_seconds(seconds)
    found = draw.power(seconds)
    assert (found.seconds, found.clock_share) == (added, clock / MEASURED.highest)
    if 119.0 + (joules + moved + attention) / seconds <= 700.0:
        assert (clock, added) == (MEASURED.highest, 0.0)
    else:
        assert power_limit.LEAST_CLOCK <= clock <= MEASURED.highest
        assert added >= 0.0
        if clock > power_limit.LEAST_CLOCK:
            assert found.watts == pytest.approx(700.0)
        else:
            assert found.watts >= 700.0 * (1 - 1e-6)
    assert draw.times(1.1).added_seconds(seconds) >= draw.added_seconds(seconds)


def test_a_few_products_among_bytes_of_the_cache_do_not_stand_still() -> None:
    """Bytes counted at more than the part draws: one product in a hundred took 73 times as long."""
    draw = Draw(700.0, 119.0, 1.0, loads((1.0, 1e-3, 1e-5)))
    assert draw.added_seconds(1e-3) <= 1e-5
    assert draw.clock(1e-3) == power_limit.LEAST_CLOCK


def test_a_clock_slows_what_runs_faster_by_itself_and_goes_by_it() -> None:
    """Products run at 1, attention above it, copies not by the clock at all."""
    draw = Draw(700.0, 119.0, 5.0, loads((1.0, 1.0, 0.1), (1.04, 1.0, 0.1)), MEASURED)
    assert draw.slowed(MEASURED.highest) == draw.slowed(1.04) == 0.0
    assert draw.slowed(1.0) == pytest.approx(0.1 * 0.04)
    assert draw.slowed(0.8) == pytest.approx(0.1 * 0.25 + 0.1 * 0.3)


def test_attention_and_generated_kernels_lengthen_with_products(h200: Profile, generated: TimedOp) -> None:
    """In a row with products attention slows by more than they, what reads and writes by less."""
    product = TimedOp("forward", "mm", 0.0, describe(Gemm(m=8192, n=4096, k=4096, dtype="bf16", layout="nt")), 0.1)
    product = replace(product, count=290)
    shape = Attention(
        batch=4, heads=16, kv_heads=16, seq=2048, head_dim=128, causal=True, dtype="bf16", direction="fwd"
    )
    attention = TimedOp("forward", "sdpa", 0.0, describe(shape), 0.01, count=70)
    losses = replace(generated, seconds=0.01)
    ops = [product, attention, losses]
    clock = power_limit.draw_of(ops, h200).clock(0.12)
    assert 0.7 < clock < 1.0
    mm, sdpa, loss = power_limit.seconds_after_rest(ops, h200, clock)
    assert 1.0 < mm / 0.1 < sdpa / 0.01 < 1.0 / clock * 1.04
    assert 1.0 < loss / 0.01 < sdpa / 0.01
    short = [replace(op, seconds=op.seconds / 10.0) for op in ops]
    assert power_limit.seconds_after_rest(short, h200, clock) == [0.01, 0.001, 0.001], "the clock has not fallen yet"
    eager = power_limit.loads_of([product, attention], h200)
    assert [load.own for load in eager] == [1.0, 1.0], "of eager steps nobody chose clocks"


def test_where_no_clock_was_measured_products_and_attention_are_held_alike(h200: Profile, generated: TimedOp) -> None:
    """An H100's kernels, by the law whose closed form this is: static + (c E + B) / (T - M + M / c) = limit."""
    gpu = find_profile("nvidia-h100-sxm")
    assert power_limit.clocks_of([generated], gpu) is power_limit.clocks_of([], h200) is OF_PRODUCTS
    assert power_limit.clocks_of([generated], h200) is MEASURED
    draw = Draw(700.0, 119.0, 5.0, loads((1.0, 60.0, 0.08)))
    clock, seconds = draw.clock(0.09), 0.09 + draw.added_seconds(0.09)
    assert seconds == pytest.approx(0.09 - 0.08 + 0.08 / clock)
    assert 119.0 + (clock * 60.0 + 5.0) / seconds == pytest.approx(700.0)


def test_products_without_a_pause_run_at_the_sustained_rate(h200: Profile) -> None:
    """The law's own end: nothing but large products, at their burst's rate, fall to what was measured at the limit."""
    shape = Gemm(m=8192, n=8192, k=8192, dtype="bf16", layout="nt")
    work = describe(shape)
    burst = h200.ceilings["matrix_burst/bf16"].value
    op = TimedOp("forward", "mm", 0.0, work=work, seconds=work.flops / burst, launches=1)
    draw = power_limit.draw_of([op], h200)
    seconds = op.seconds + draw.added_seconds(op.seconds)
    assert work.flops / seconds == pytest.approx(h200.ceilings["matrix_sustained/bf16"].value, rel=1e-6)
    # `power.ENERGY` is the same constant at the sustained clock, from the same part
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
