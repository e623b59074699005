"""The processor's timer under a clock that is made up: stopping, filling a sample, rotating operands."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flopcast.microbench.timing.cpu_timer import CpuTimer
from flopcast.microbench.timing.operands import Call, Operands
from flopcast.microbench.timing.policy import TimingPolicy

POLICY = TimingPolicy(
    min_samples=10, max_samples=40, timeout_seconds=1.0, timeout_samples=3, warm_up_calls=1,
    max_rotation_bytes=1 << 20, rotation_seconds=60.0,  # a busy machine takes its time to copy
)  # fmt: skip


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


def test_denormals_are_as_before_after_timing() -> None:
    made_up_clock(1_000_000).time(lambda operands: lambda: None, (), "hot")
    assert (torch.tensor(1e-30) * 1e-10).item() != 0
