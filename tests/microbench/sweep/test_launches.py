"""Launches, of what can be tried without a GPU."""

from __future__ import annotations

from flopcast.microbench.sweep import launches


def test_the_first_stalled_launch_tells_the_depth_of_the_queue() -> None:
    assert launches.first_stall([0.0, 1e-5, 2e-5, 0.1, 0.2], 5e-3) == 2
    assert launches.first_stall([0.0, 1e-5, 2e-5], 5e-3) is None
