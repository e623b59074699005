from dataclasses import replace
from datetime import date
from itertools import pairwise
from math import exp, hypot, log

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.roofline.dollars.crossovers import (
    NO_COMMON_SIZE,
    NOT_SEPARABLE,
    best_gpu,
    break_even_price_ratio,
    crossovers,
    sentence,
)
from flopcast.roofline.dollars.points import CostCurve, StepPoint, cost_curve
from flopcast.roofline.dollars.tables import cost_rows, cost_tables
from flopcast.roofline.gpu.catalogue.prices import Price

SIZES = [1e8, 2e8, 4e8, 8e8, 16e8]


def price(gpu: str, usd: float) -> Price:
    return Price(
        gpu=gpu,
        provider="Me",
        kind="on-demand",
        usd_per_hour=usd,
        date=date(2025, 11, 15),
        date_inferred=True,
        source="test",
    )


def curve(
    gpu: str, seconds: list[float], usd: float = 1.0, error: float = 0.0, fits: int = 99, sizes: list[float] = SIZES
) -> CostCurve:
    steps = [
        StepPoint(
            n_params=int(n),
            step_seconds=s,
            low=s / (1 + error),
            high=s * (1 + error),
            flops_counted=6 * n * 1024,
            tokens=1024,
            fits=i < fits,
        )
        for i, (n, s) in enumerate(zip(sizes, seconds, strict=True))
    ]
    return cost_curve(gpu, steps, price(gpu, usd))


# a: host-bound, 0.1 s whatever the size; b: device-bound, 0.05 s at the smallest and proportional to size
FLAT = [0.1] * 5
STEEP = [0.05, 0.1, 0.2, 0.4, 0.8]

seconds_lists = st.lists(st.floats(1e-3, 1e2), min_size=5, max_size=5)
dollars = st.floats(0.05, 50)
errors = st.floats(0, 0.5)


# --- laws

laws = settings(deadline=None, max_examples=60)  # a busy machine is no reason to fail


@laws
@given(seconds_lists, dollars, st.floats(0.1, 10))
def test_flops_per_usd_is_inverse_to_price(seconds: list[float], usd: float, factor: float) -> None:
    one = curve("a", seconds, usd, 0.1)
    two = one.at_price(price("a", usd * factor))
    for p, q in zip(one.points, two.points, strict=True):
        assert q.flops_per_usd.value * factor == pytest.approx(p.flops_per_usd.value)
        assert q.usd_per_step == pytest.approx(p.usd_per_step * factor)
        assert q.usd_per_million_tokens.high == pytest.approx(p.usd_per_million_tokens.high * factor)
        assert q.tokens_per_second == p.tokens_per_second


@laws
@given(seconds_lists, seconds_lists, dollars, dollars, errors, st.floats(1e8, 16e8))
def test_at_the_break_even_ratio_both_are_equal(
    a: list[float], b: list[float], usd_a: float, usd_b: float, error: float, size: float
) -> None:
    one, two = curve("a", a, usd_a, error), curve("b", b, usd_b, error)
    even = break_even_price_ratio(one, two, size)
    assert even is not None
    assert even.low <= even.ratio <= even.high
    dearer = one.at_price(price("a", usd_b * even.ratio))
    x, y = dearer.flops_per_usd_at(size), two.flops_per_usd_at(size)
    assert x is not None
    assert y is not None
    assert x.value == pytest.approx(y.value)
    other = break_even_price_ratio(two, one, size)
    assert other is not None
    assert other.ratio * even.ratio == pytest.approx(1.0)
    assert other.low * even.high == pytest.approx(1.0)
    repriced = break_even_price_ratio(one.at_price(price("a", 1.0)), two, size)
    assert repriced is not None
    assert repriced.ratio == pytest.approx(even.ratio)


@laws
@given(seconds_lists, seconds_lists, errors, st.floats(0.1, 10))
def test_scaling_all_prices_leaves_the_crossovers(a: list[float], b: list[float], error: float, factor: float) -> None:
    before = crossovers([curve("a", a, 1.0, error), curve("b", b, 2.0, error)])
    after = crossovers([curve("a", a, factor, error), curve("b", b, 2.0 * factor, error)])
    assume(all(abs(abs(x / y) - 1) > 1e-6 for x, y in zip(a, b, strict=True)))
    assert [row.status for row in before] == [row.status for row in after]
    for one, two in zip(before, after, strict=True):
        assert (one.below, one.above) == (two.below, two.above)
        for name in ("n_params", "low", "high"):
            assert getattr(one, name) == pytest.approx(getattr(two, name))


@laws
@given(seconds_lists, seconds_lists, errors)
def test_a_crossover_does_not_depend_on_the_order_and_lies_in_its_interval(
    a: list[float], b: list[float], error: float
) -> None:
    one, two = curve("a", a, 1.0, error), curve("b", b, 1.0, error)
    rows, mirrored = crossovers([one, two]), crossovers([two, one])
    for row, other in zip(rows, mirrored, strict=True):
        assert (row.status, row.below, row.above) == (other.status, other.below, other.above)
        assert row.n_params == pytest.approx(other.n_params)
        if row.status == "crossover":
            assert row.n_params is not None
            assert (row.low or 1e8) <= row.n_params * (1 + 1e-9)
            assert row.n_params <= (row.high or 16e8) * (1 + 1e-9)
            assert {row.below, row.above} == {"a", "b"}


@laws
@given(seconds_lists, seconds_lists, st.floats(0.01, 0.3), st.floats(1.0, 3.0))
def test_wider_errors_never_decide_more(a: list[float], b: list[float], error: float, wider: float) -> None:
    at = 4e8
    narrow = best_gpu([curve("a", a, 1.0, error), curve("b", b, 1.0, error)], at)
    wide = best_gpu([curve("a", a, 1.0, error * wider), curve("b", b, 1.0, error * wider)], at)
    assert narrow is not None
    assert wide is not None
    assert narrow.gpu == wide.gpu
    assert set(narrow.contenders) <= set(wide.contenders)


@laws
@given(seconds_lists, dollars, st.integers(0, 4))
def test_a_slower_step_gives_fewer_flops_per_usd(seconds: list[float], usd: float, which: int) -> None:
    slower = [s * (1.5 if i == which else 1.0) for i, s in enumerate(seconds)]
    for p, q in zip(curve("a", seconds, usd).points, curve("a", slower, usd).points, strict=True):
        assert (q.flops_per_usd.value < p.flops_per_usd.value) == (q.step.step_seconds > p.step.step_seconds)


@laws
@given(seconds_lists, st.floats(1e8, 16e8))
def test_the_curve_goes_through_its_points_and_stays_between_neighbours(seconds: list[float], size: float) -> None:
    one = curve("a", seconds)
    for point in one.points:
        assert one.flops_per_usd_at(point.step.n_params) == point.flops_per_usd
    at = one.flops_per_usd_at(size)
    assert at is not None
    for left, right in pairwise(one.points):
        if left.step.n_params <= size <= right.step.n_params:
            ends = sorted((left.flops_per_usd.value, right.flops_per_usd.value))
            assert ends[0] * (1 - 1e-9) <= at.value <= ends[1] * (1 + 1e-9)


# --- cases worked by hand


def test_the_figures_of_one_point() -> None:
    (point, *_) = curve("a", FLAT, usd=3.6, error=0.25).points
    assert point.flops_per_second.value == pytest.approx(6 * 1e8 * 1024 / 0.1)
    assert point.flops_per_usd.value == pytest.approx(point.flops_per_second.value * 1000)
    assert point.usd_per_step == pytest.approx(1e-4)
    assert point.usd_per_million_tokens.value == pytest.approx(1e-4 / 1024 * 1e6)
    assert point.flops_per_usd.low == pytest.approx(point.flops_per_usd.value / 1.25)
    assert point.usd_per_million_tokens.low == pytest.approx(point.usd_per_million_tokens.value / 1.25)


def test_a_crossover_is_found_between_points() -> None:
    (row,) = crossovers([curve("a", FLAT, usd=4.0), curve("b", STEEP, usd=1.0)])
    # equal where STEEP takes 4 x 0.1 s: at 8e8
    assert (row.status, row.below, row.above) == ("crossover", "b", "a")
    assert row.n_params == pytest.approx(8e8)
    (row,) = crossovers([curve("a", FLAT, usd=2**1.5), curve("b", STEEP, usd=1.0)])
    assert row.n_params == pytest.approx(2**2.5 * 1e8)
    assert row.low == pytest.approx(row.n_params)
    assert row.high == pytest.approx(row.n_params)


def test_errors_give_a_crossover_its_interval() -> None:
    (row,) = crossovers([curve("a", FLAT, 2.0, 0.2), curve("b", STEEP, 1.0, 0.2)])
    spread = 1.2 ** (2**0.5)  # two independent errors of 1.2
    assert row.n_params == pytest.approx(4e8)
    assert row.low == pytest.approx(4e8 / spread)
    assert row.high == pytest.approx(4e8 * spread)
    (row,) = crossovers([curve("a", FLAT, 1.05, 0.2), curve("b", [s * 2 for s in STEEP], 1.0, 0.2)])
    assert row.status == "crossover"
    assert row.low is None  # may lie below the smallest model compared


def test_what_is_not_separable_is_said_to_be_so() -> None:
    near = [0.1, 0.11, 0.1, 0.09, 0.1]
    (row,) = crossovers([curve("a", FLAT, 1.0, 0.3), curve("b", near, 1.0, 0.3)])
    assert row.status == NOT_SEPARABLE
    assert NOT_SEPARABLE in sentence(row)
    best = best_gpu([curve("a", FLAT, 1.0, 0.3), curve("b", near, 1.0, 0.3)], 2e8)
    assert best is not None
    assert (best.gpu, best.contenders, best.separable) == ("a", ("b",), False)


def test_a_leader_is_named() -> None:
    (row,) = crossovers([curve("a", FLAT, 10.0, 0.1), curve("b", FLAT, 1.0, 0.1)])
    assert (row.status, row.below, row.above) == ("leads", "b", "b")
    best = best_gpu([curve("a", FLAT, 10.0, 0.1), curve("b", FLAT, 1.0, 0.1)], 3e8)
    assert best is not None
    assert (best.gpu, best.separable) == ("b", True)


def test_a_lead_that_is_decided_in_part_says_where() -> None:
    """b is 10 times as fast at the smallest model and 1.1 times from the third on: within errors of 1.1."""
    near = [0.01, 0.05, 0.09, 0.09, 0.09]
    (row,) = crossovers([curve("a", FLAT, 1.0, 0.1), curve("b", near, 1.0, 0.1)])
    assert (row.status, row.below, row.low) == ("leads", "b", pytest.approx(1e8))
    assert row.high is not None
    assert 2e8 < row.high < 4e8
    assert "beyond the intervals from 100M to" in sentence(row)


def test_a_lead_that_is_open_in_the_middle_is_not_said_to_be_decided_there() -> None:
    a = curve("a", [1.0, 2.0, 4.0, 8.0, 16.0], error=0.1)
    b = curve("b", [0.7, 1.4, 3.9, 5.0, 8.0], error=0.1)
    (row,) = crossovers([a, b])
    assert (row.status, row.below) == ("leads", "b")
    assert row.low is not None
    assert row.high is not None
    assert 4e8 < row.low < 8e8  # from there up, two doublings; from 100 M it is less than one and a half
    assert row.high == pytest.approx(16e8)


def test_a_pair_may_cross_twice() -> None:
    rows = crossovers([curve("a", FLAT), curve("b", [0.05, 0.2, 0.2, 0.2, 0.05])])
    assert [(row.below, row.above) for row in rows] == [("b", "a"), ("a", "b")]


def test_beyond_its_memory_a_gpu_is_not_compared() -> None:
    small = curve("small", FLAT, 1.0, fits=2)
    assert small.largest_fitting == int(2e8)
    assert small.smallest_failing == int(4e8)
    assert small.flops_per_usd_at(3e8) is None
    big = curve("big", STEEP, 1.0)
    best = best_gpu([small, big], 8e8)
    assert best is not None
    assert best.gpu == "big"
    assert best.separable
    assert break_even_price_ratio(small, big, 8e8) is None
    (row,) = crossovers([small, big])
    assert row.compared_to == pytest.approx(2e8)
    (row,) = crossovers([curve("none", FLAT, fits=0), big])
    assert row.status == NO_COMMON_SIZE
    assert best_gpu([small], 8e8) is None


def test_break_even_says_who_is_the_better_buy() -> None:
    a, b = curve("a", FLAT, 1.0, 0.1), curve("b", STEEP, 1.0, 0.1)
    at = {size: break_even_price_ratio(a, b, size) for size in (1e8, 2e8, 16e8)}
    assert [even.better if even else "?" for even in at.values()] == ["b", None, "a"]


def test_rows_keep_what_does_not_fit_with_a_reason() -> None:
    curves = [curve("a", FLAT, 1.0, 0.1, fits=3), curve("b", STEEP, 1.0, 0.1)]
    rows = cost_rows(curves)
    assert len(rows) == 10
    assert len({tuple(row) for row in rows}) == 1  # the same columns everywhere
    lost = [row for row in rows if not row["fits"]]
    assert [row["reason"] for row in lost] == ["out of memory"] * 2
    assert all(row["flops_per_usd"] is None and row["price_usd_per_hour"] == 1.0 for row in lost)
    assert {row["price_date"] for row in rows} == {"2025-11-15"}
    assert len(cost_tables(curves)["break_even"]) == 3
    assert [row["gpu"] for row in cost_tables(curves)["best"]] == ["b", "a", "a", "b", "b"]
    (text,) = (row["sentence"] for row in cost_tables(curves)["crossovers"])
    assert text.startswith("b gives more below 200M parameters, a above")


def test_points_that_make_no_curve_are_refused() -> None:
    with pytest.raises(UsageError, match="two configurations of 100000000 parameters"):
        curve("a", [0.1, 0.1], sizes=[1e8, 1e8])
    point = curve("a", FLAT).points[0].step
    for change in ({"low": 0.2}, {"high": 0.01}, {"n_params": 0}, {"step_seconds": 0.0, "low": 0.0}):
        with pytest.raises(UsageError, match="step point needs"):
            replace(point, **change)


# --- what two forecasts share


def moved(one: CostCurve, **shared: tuple[float, float]) -> CostCurve:
    """The curve with causes that move its steps, within the interval that it has."""
    points = tuple(replace(p, step=replace(p.step, shared=shared)) for p in one.points)
    return replace(one, points=points)


def test_what_both_share_cancels() -> None:
    """All of both errors is one host, to which both are bound: their ratio is known exactly."""
    moves = (-log(1.2), log(1.2))
    a, b = (moved(curve(gpu, FLAT, 1.0, 0.2), host=moves) for gpu in "ab")
    ratio = a.points[0].flops_per_usd.over(b.points[0].flops_per_usd)
    assert (ratio.value, ratio.low, ratio.high) == (1.0, pytest.approx(1.0), pytest.approx(1.0))
    best = best_gpu([a.at_price(price("a", 1.01)), b], 3e8)
    assert best is not None
    assert (best.gpu, best.separable) == ("b", True)


def test_a_cause_that_one_alone_feels_does_not_cancel() -> None:
    alone = moved(curve("a", FLAT, 1.0, 0.2), host=(-log(1.2), log(1.2)))
    for other in (curve("b", FLAT, 1.0, 0.2), moved(curve("b", FLAT, 1.0, 0.2), bias=(-0.1, 0.1))):
        ratio = alone.points[0].flops_per_usd.over(other.points[0].flops_per_usd)
        spread = 1.2 ** (2**0.5)
        assert (ratio.low, ratio.high) == (pytest.approx(1 / spread), pytest.approx(spread))


@laws
@given(st.floats(0.0, 0.4), st.floats(0.0, 0.4), st.floats(0.01, 0.5))
def test_a_ratio_keeps_what_does_not_cancel(one: float, two: float, own: float) -> None:
    """A cause that moves a by `one` and b by `two` leaves their difference, beside what is each one's own."""
    a, b = (
        moved(curve(gpu, FLAT, 1.0, exp(hypot(own, by)) - 1), host=(-by, by)) for gpu, by in (("a", one), ("b", two))
    )
    ratio = a.points[0].flops_per_second.over(b.points[0].flops_per_second)
    assert log(ratio.high) == pytest.approx(hypot(own, own, one - two))
    assert log(ratio.low) == pytest.approx(-hypot(own, own, one - two))
    back = b.points[0].flops_per_second.over(a.points[0].flops_per_second)
    assert back.low * ratio.high == pytest.approx(1.0)


# --- where memory ends, other hosts


def test_memory_ends_between_the_last_that_fits_and_the_next() -> None:
    one = curve("a", FLAT, fits=2)
    points = tuple(
        replace(p, step=replace(p.step, needed_bytes=p.step.n_params * 20, memory_bytes=5_000_000_000))
        for p in one.points
    )
    assert replace(one, points=points).memory_limit == pytest.approx(2.5e8)
    assert cost_tables([replace(one, points=points)])["memory"][0]["first_that_does_not"] == 4e8
    assert one.memory_limit is None  # bytes not known
    assert curve("a", FLAT).memory_limit is None  # all fit


def test_another_host_is_another_step() -> None:
    step = replace(curve("a", FLAT, 1.0, 0.1).points[0].step, with_host={0.0: (0.05, 0.04, 0.06)})
    step = replace(step, shared={"host": (-0.1, 0.1), "bias": (-0.1, 0.1)})
    none = step.host_times(0.0)
    assert (none.step_seconds, none.low, none.high, set(none.shared)) == (0.05, 0.04, 0.06, {"bias"})
    with pytest.raises(KeyError):
        step.host_times(3.0)
