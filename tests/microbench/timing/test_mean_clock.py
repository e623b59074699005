"""The mean clock between two readings of cycles and nanoseconds on the same multiprocessors."""

from __future__ import annotations

import pytest
import torch

from flopcast.microbench.timing.mean_clock import ClockProbe, mean_mhz


def test_cycles_per_time_of_multiprocessors_that_both_readings_have() -> None:
    before = [(0, 1_000, 10_000), (1, 500_000, 10_010), (7, 3, 10_020)]
    after = [(1, 500_000 + 1_980_000, 10_010 + 1_000_000), (0, 1_000 + 1_980_000, 10_000 + 1_000_000), (9, 5, 11)]
    assert mean_mhz(before, after) == pytest.approx(1980.0)


def test_one_that_lags_is_outvoted() -> None:
    before = [(number, 0, 0) for number in range(5)]
    after = [(number, 1_600_000 if number else 10, 1_000_000) for number in range(5)]
    assert mean_mhz(before, after) == pytest.approx(1600.0)


def test_without_a_common_multiprocessor_nothing_is_told() -> None:
    assert mean_mhz([(0, 0, 0)], [(1, 10, 10)]) is None
    assert mean_mhz([(0, 0, 5)], [(0, 10, 5)]) is None


@pytest.mark.gpu
def test_a_gpu_at_work_runs_near_its_highest_clock() -> None:
    device = torch.device("cuda")
    probe = ClockProbe(device)
    assert probe.mean_mhz() is None
    a = torch.ones(1 << 26, device=device)
    for _ in range(2):  # the second time its buffers are used again
        for _ in range(50):
            a.mul_(1.0)
        torch.cuda.synchronize()
        probe.mark()
        for _ in range(50):
            a.mul_(1.0)
        probe.mark()
        assert 300.0 < (probe.mean_mhz() or 0.0) < 4000.0
