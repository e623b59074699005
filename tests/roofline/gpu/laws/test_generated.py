"""Generated kernels: bounds that no kernel leaves, on made kerneles and on those of real steps."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.generated import programs, seconds
from flopcast.roofline.gpu.library.generated import fitted, rates_of
from flopcast.roofline.stream.compiled.generated_kernel import GeneratedKernel
from flopcast.roofline.stream.compiled.launches import Kind, Work

LAW = fitted().law
RATES = rates_of(find_spec("nvidia-h200"))
GENERATED = (Kind.POINTWISE, Kind.PERSISTENT, Kind.LOOPED, Kind.SPLIT, Kind.MIXED, Kind.SCATTER)
AMOUNTS = st.integers(0, 10**10)


@st.composite
def kernels(draw: st.DrawFn) -> GeneratedKernel:
    read, age = draw(AMOUNTS), draw(AMOUNTS)
    work = Work(**{field.name: float(draw(st.integers(0, 10**9))) for field in fields(Work)})
    numels = (("x", draw(st.integers(1, 10**8))), ("r0_", draw(st.integers(1, 10**6))))
    ages = ((draw(st.integers(0, read)), age),)
    hint = draw(st.sampled_from(["INNER", "OUTER"]))
    kind = draw(st.sampled_from(GENERATED))
    return GeneratedKernel(
        kind=kind, bytes_read=read, bytes_written=draw(AMOUNTS), numels=numels, hint=hint, work=work, ages=ages
    )


@given(kernels())
def test_never_below_the_floor_nor_the_bandwidth_of_the_l2(kernel: GeneratedKernel) -> None:
    found = seconds(kernel, RATES, LAW)
    assert found >= LAW.floor
    fastest = max(LAW.read * RATES.bandwidth, LAW.written * RATES.bandwidth, LAW.cached * RATES.sm_count * RATES.clock)
    assert found >= kernel.bytes / fastest


@given(kernels(), st.integers(1, 10**9))
def test_more_bytes_never_take_less(kernel: GeneratedKernel, more: int) -> None:
    before = seconds(kernel, RATES, LAW)
    for longer in (
        replace(kernel, bytes_read=kernel.bytes_read + more),
        replace(kernel, bytes_written=kernel.bytes_written + more),
        replace(kernel, ages=tuple((size, age + more) for size, age in kernel.ages)),
    ):
        assert seconds(longer, RATES, LAW) >= before * (1 - 1e-12)


@given(kernels(), st.sampled_from([field.name for field in fields(Work)]), st.integers(1, 10**9))
def test_more_work_never_takes_less(kernel: GeneratedKernel, what: str, more: int) -> None:
    busier = replace(kernel, work=kernel.work.plus(**{what: float(more)}))
    assert seconds(busier, RATES, LAW) >= seconds(kernel, RATES, LAW) * (1 - 1e-12)


@given(kernels(), st.floats(1.0, 10.0))
def test_a_gpu_of_higher_rates_never_takes_longer(kernel: GeneratedKernel, factor: float) -> None:
    for better in (
        RATES._replace(bandwidth=RATES.bandwidth * factor),
        RATES._replace(clock=RATES.clock * factor),
        RATES._replace(l2_bytes=RATES.l2_bytes * factor),
    ):
        assert seconds(kernel, better, LAW) <= seconds(kernel, RATES, LAW) * (1 + 1e-12) or (
            better.bandwidth > LAW.cached * RATES.sm_count * RATES.clock / LAW.read
        )


def test_few_rows_leave_sms_idle() -> None:
    """A looped reduction of 1,024 rows of a vocabulary takes more than an eighth of one of 8,192."""
    many = GeneratedKernel(
        kind=Kind.LOOPED, bytes_read=2 * 10**9, bytes_written=0, numels=(("x", 8192), ("r0_", 151936)), hint="INNER"
    )
    few = replace(many, bytes_read=many.bytes_read // 8, numels=(("x", 1024), ("r0_", 151936)))
    assert 8 * seconds(few, RATES, LAW) > 1.05 * seconds(many, RATES, LAW)


def pointwise(elements: int, read: int, written: int) -> GeneratedKernel:
    return GeneratedKernel(kind=Kind.POINTWISE, bytes_read=read, bytes_written=written, numels=(("x", elements),))


def test_programs_are_those_that_inductor_launches() -> None:
    assert programs(pointwise(600_000_000, 0, 1)) == 585_938
    assert programs(pointwise(1000, 0, 1)) == 4
    rows = GeneratedKernel(
        kind=Kind.PERSISTENT, bytes_read=1, bytes_written=1, numels=(("x", 8192), ("r0_", 1024)), hint="INNER"
    )
    assert programs(rows) == 8192
    assert programs(replace(rows, numels=(("x", 8192), ("r0_", 128)))) == 1024


def test_a_tensor_of_two_bytes_is_filled_more_slowly_than_one_of_four() -> None:
    """Programs begin one after another: 3.4 TB/s and 4.7 were measured (reports/nvidia-h200/traffic and steps)."""
    narrow, wide = pointwise(600_000_000, 0, 1_200_000_000), pointwise(300_000_000, 0, 1_200_000_000)
    assert seconds(narrow, RATES, LAW) > 1.2 * seconds(wide, RATES, LAW)


def test_memory_that_reads_in_between_is_slower_to_write() -> None:
    both = seconds(pointwise(10**8, 4 * 10**8, 8 * 10**8), RATES, LAW)
    alone = [seconds(pointwise(10**8, *bytes_), RATES, LAW) for bytes_ in ((4 * 10**8, 0), (0, 8 * 10**8))]
    assert both > 1.02 * sum(alone)
