"""Whole compiled steps against the recorded ones: what the timeline makes of kernels and of the host."""

from __future__ import annotations

from functools import cache

from studies.compiled.timeline import Timed, timed_steps


@cache
def found() -> dict[tuple[str, str], Timed]:
    return {(one.name, one.mode): one for one in timed_steps(["qwen3-0.6b-4x256"])}


def test_a_captured_step_is_its_kernels_with_short_gaps() -> None:
    """1,791 kernels in 19.4 ms: with the gaps of single launches between them the step would be 9% longer."""
    assert abs(found()["qwen3-0.6b-4x256", "compile-graphs"].error) < 0.03


def test_a_step_that_the_host_bounds_is_the_hosts() -> None:
    """28 layers at 1,024 tokens; the host was shared, which the interval says."""
    one = found()["qwen3-0.6b-4x256", "compile"]
    assert one.bound == "host"
    assert abs(one.error) < 0.10
    assert one.forecast.high / one.forecast.low > 2.0


def test_a_captured_step_is_within_its_interval() -> None:
    assert found()["qwen3-0.6b-4x256", "compile-graphs"].is_within
