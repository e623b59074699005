"""The stopping rule, rotation of operands, and the processor's timer under a clock that is made up."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.microbench.timing.cpu_timer import CpuTimer
from flopcast.microbench.timing.operands import Call, Operands, clone_operands, rotation_sets, storage_bytes
from flopcast.microbench.timing.policy import WARM_UP_CAP, TimingPolicy, should_stop, warm_up_until_settled

POLICY = TimingPolicy(
    min_samples=10, max_samples=40, timeout_seconds=1.0, timeout_samples=3, warm_up_calls=1,
    max_rotation_bytes=1 << 20, rotation_seconds=60.0,  # a busy machine takes its time to copy
)  # fmt: skip


@given(
    samples=st.lists(st.floats(min_value=1e-6, max_value=1.0), max_size=60), elapsed=st.floats(min_value=0, max_value=3)
)
def test_stopping_rule(samples: list[float], elapsed: float) -> None:
    stop = should_stop(samples, elapsed, POLICY)
    if len(samples) >= POLICY.max_samples:
        assert stop
    elif len(samples) < POLICY.timeout_samples:
        assert not stop
    elif elapsed >= POLICY.timeout_seconds:
        assert stop
    elif len(samples) < POLICY.min_samples:
        assert not stop
    else:
        noise = statistics.stdev(samples) / statistics.fmean(samples)
        assert stop == (noise < POLICY.relative_noise)


def made_up_clock(step_ns: int) -> CpuTimer:
    """A processor timer on whose clock every stretch of calls takes `step_ns`."""
    ticks = itertools.count(step=step_ns)
    return CpuTimer(POLICY, clock_ns=lambda: next(ticks))


def test_steady_calls_stop_at_the_least_number_of_samples() -> None:
    timing = made_up_clock(1_000_000).time(lambda operands: lambda: None, (), "hot")
    assert len(timing.samples) == POLICY.min_samples
    assert timing.seconds == pytest.approx(1e-3)
    assert timing.timer == "wall"


def test_slow_calls_stop_at_the_time_out() -> None:
    timing = made_up_clock(400_000_000).time(lambda operands: lambda: None, (), "hot")
    assert len(timing.samples) == 3  # 0.4 s each, time-out 1 s


def test_short_calls_fill_a_sample() -> None:
    timing = made_up_clock(10_000).time(lambda operands: lambda: None, (), "hot")
    assert timing.calls_per_sample == 20  # 200 us of 10 us each
    assert timing.seconds == pytest.approx(10e-6 / 20)


def test_cold_rotates_over_different_operands_and_hot_repeats_one() -> None:
    used: list[int] = []

    def prepare(operands: Operands) -> Call:
        return lambda: used.append(operands[0].data_ptr())

    operands = (torch.randn(1 << 14),)  # 64 KiB: 16 sets fill the MiB allowed
    hot = made_up_clock(1_000_000).time(prepare, operands, "hot")
    assert hot.sets == len(set(used)) == 1
    used.clear()
    cold = made_up_clock(1_000_000).time(prepare, operands, "cold")
    assert cold.sets == len(set(used)) == 16
    assert "partly warm" in cold.warnings[0]


def test_calls_that_are_dear_to_prepare_are_flushed_for() -> None:
    prepared: list[int] = []

    def prepare(operands: Operands) -> Call:
        prepared.append(1)
        return lambda: None

    cpu = CpuTimer(replace(POLICY, rotation_seconds=0.0))
    timing = cpu.time(prepare, (torch.randn(1 << 14),), "cold")
    assert timing.sets == 1
    assert len(prepared) == 2
    assert not timing.warnings


@given(footprint=st.integers(0, 1 << 34), cache=st.integers(1 << 20, 1 << 28), free=st.integers(0, 1 << 37))
def test_rotation_outgrows_the_cache_within_the_memory_allowed(footprint: int, cache: int, free: int) -> None:
    policy = TimingPolicy()
    sets = rotation_sets(footprint, cache, free, policy)
    assert 1 <= sets <= policy.max_sets
    if sets > 1:
        assert sets * footprint <= min(policy.max_rotation_bytes, free / 2)
    if 1 < sets < policy.max_sets and (sets + 1) * footprint <= min(policy.max_rotation_bytes, free / 2):
        assert sets == 2 or sets * footprint >= policy.rotation_factor * cache


def test_clones_lie_in_memory_as_their_originals() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    bias = torch.randn(6).expand(4, 6)
    leaf = torch.randn(3, requires_grad=True)
    originals = (base.T, base[1:, 2:], bias, leaf, torch.tensor(3))
    clones = clone_operands(originals)
    for original, clone in zip(originals, clones, strict=True):
        assert torch.equal(original, clone)
        assert original.stride() == clone.stride()
        assert original.storage_offset() == clone.storage_offset()
        assert original.data_ptr() != clone.data_ptr()
        assert original.requires_grad == clone.requires_grad
    clones[0].zero_()  # a view of the same storage sees it, the original does not
    assert not clones[1].any()
    assert base.any()


def test_footprint_counts_a_shared_storage_once() -> None:
    base = torch.zeros(100)
    assert storage_bytes([base, base[10:], {"x": (torch.zeros(5),)}, 3, None]) == 400 + 20


def test_denormals_are_as_before_after_timing() -> None:
    made_up_clock(1_000_000).time(lambda operands: lambda: None, (), "hot")
    assert (torch.tensor(1e-30) * 1e-10).item() != 0


# --- warm-up ------------------------------------------------------------------------------------------------


def warmed(
    clocks: list[float | None], batch_seconds: list[float], warm_up_seconds: float = 1.0
) -> tuple[bool, int, float]:
    """(settled, batches run, seconds taken) of a device whose n-th batch takes batch_seconds[n] at clocks[n]; the last
    ones go on for ever."""
    now, runs = 0.0, 0

    def reference() -> float | None:
        nonlocal now, runs
        now += batch_seconds[min(runs, len(batch_seconds) - 1)]
        runs += 1
        return clocks[min(runs, len(clocks)) - 1]

    policy = replace(POLICY, warm_up_seconds=warm_up_seconds, settle_tolerance=0.02)
    settled = warm_up_until_settled(reference, policy, clock=lambda: now)
    return settled, runs, now


def test_warm_up_of_a_steady_device_takes_the_least_time() -> None:
    assert warmed([1980.0], [0.04]) == (True, 25, pytest.approx(1.0))


def test_warm_up_waits_until_the_clock_holds_still() -> None:
    rising = [1000.0 + 25 * i for i in range(40)]  # 1.6 s to the top, 2.5% and less a batch
    settled, runs, seconds = warmed([*rising, 1980.0], [0.04])
    assert settled
    assert 38 < runs < 48
    assert seconds < 2.0


def test_warm_up_waits_for_the_reference_where_no_clock_can_be_read() -> None:
    """Without NVML the reference's own time tells."""
    slowing = [0.04 * 1.03**i for i in range(24)]  # heat: each batch 3% slower, for 1.4 s
    settled, runs, _ = warmed([None], [*slowing, slowing[-1]])
    assert settled
    assert 24 < runs < 32


@pytest.mark.parametrize("clocks", [[1980.0, 1500.0] * 100, [None]])
def test_warm_up_is_cut_off_where_nothing_settles(clocks: list[float | None]) -> None:
    """A power cap lets the clock swing for ever."""
    times = [0.04] if clocks[0] else [0.04, 0.05] * 100
    settled, _, seconds = warmed(clocks, times)
    assert not settled
    assert WARM_UP_CAP <= seconds < WARM_UP_CAP + 0.1


def test_no_warm_up_is_no_warm_up() -> None:
    assert warmed([None], [0.04], warm_up_seconds=0.0) == (True, 0, 0.0)
