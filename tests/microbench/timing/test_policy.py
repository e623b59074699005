"""The stopping rule, and the warm-up."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
