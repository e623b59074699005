"""Generated kernels: bounds that no kernel leaves, on made launches and on those of real steps."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import DataError
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.generated import seconds
from flopcast.roofline.gpu.library.generated import fitted, rates_of
from flopcast.roofline.stream.compiled.launches import Kind, Launch, Work

LAW = fitted().law
RATES = rates_of(find_spec("nvidia-h200"))
GENERATED = (Kind.POINTWISE, Kind.PERSISTENT, Kind.LOOPED, Kind.SPLIT, Kind.MIXED, Kind.SCATTER)
AMOUNTS = st.integers(0, 10**10)


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    read, age = draw(AMOUNTS), draw(AMOUNTS)
    work = Work(**{field.name: float(draw(st.integers(0, 10**9))) for field in fields(Work)})
    numels = (("x", draw(st.integers(1, 10**8))), ("r0_", draw(st.integers(1, 10**6))))
    ages = ((draw(st.integers(0, read)), age),)
    hint = draw(st.sampled_from(["INNER", "OUTER"]))
    kind = draw(st.sampled_from(GENERATED))
    return Launch(kind, "triton_x", read, draw(AMOUNTS), numels, hint, work=work, ages=ages)


@given(launches())
def test_never_below_the_floor_nor_the_bandwidth_of_the_l2(launch: Launch) -> None:
    found = seconds(launch, RATES, LAW)
    assert found >= LAW.floor
    fastest = max(LAW.read * RATES.bandwidth, LAW.written * RATES.bandwidth, LAW.cached * RATES.sm_count * RATES.clock)
    assert found >= launch.bytes / fastest


@given(launches(), st.integers(1, 10**9))
def test_more_bytes_never_take_less(launch: Launch, more: int) -> None:
    before = seconds(launch, RATES, LAW)
    for longer in (
        replace(launch, bytes_read=launch.bytes_read + more),
        replace(launch, bytes_written=launch.bytes_written + more),
        replace(launch, ages=tuple((size, age + more) for size, age in launch.ages)),
    ):
        assert seconds(longer, RATES, LAW) >= before * (1 - 1e-12)


@given(launches(), st.sampled_from([field.name for field in fields(Work)]), st.integers(1, 10**9))
def test_more_work_never_takes_less(launch: Launch, what: str, more: int) -> None:
    assert launch.work is not None
    busier = replace(launch, work=launch.work.plus(**{what: float(more)}))
    assert seconds(busier, RATES, LAW) >= seconds(launch, RATES, LAW) * (1 - 1e-12)


@given(launches(), st.floats(1.0, 10.0))
def test_a_gpu_of_higher_rates_never_takes_longer(launch: Launch, factor: float) -> None:
    for better in (
        RATES._replace(bandwidth=RATES.bandwidth * factor),
        RATES._replace(clock=RATES.clock * factor),
        RATES._replace(l2_bytes=RATES.l2_bytes * factor),
    ):
        assert seconds(launch, better, LAW) <= seconds(launch, RATES, LAW) * (1 + 1e-12) or (
            better.bandwidth > LAW.cached * RATES.sm_count * RATES.clock / LAW.read
        )


def test_few_rows_leave_sms_idle() -> None:
    """A looped reduction of 1,024 rows of a vocabulary takes more than an eighth of one of 8,192."""
    many = Launch(Kind.LOOPED, "triton_x", 2 * 10**9, 0, (("x", 8192), ("r0_", 151936)), "INNER", work=Work())
    few = replace(many, bytes_read=many.bytes_read // 8, numels=(("x", 1024), ("r0_", 151936)))
    assert 8 * seconds(few, RATES, LAW) > 1.05 * seconds(many, RATES, LAW)


def test_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="compile without max-autotune"):
        seconds(Launch(Kind.TEMPLATE, "triton_tem_fused_mm_0", 1, 1, work=Work()), RATES, LAW)
    with pytest.raises(DataError, match="is no generated"):
        seconds(Launch(Kind.PRODUCT, "mm", 1, 1), RATES, LAW)
