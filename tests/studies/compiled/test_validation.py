"""Compiled steps that ran on an H200, beside their forecasts: a worse law of kernels, memory or timeline fails here."""

from __future__ import annotations

from statistics import median

import pytest

from flopcast.roofline.validation.step_comparison import Part, StepComparison
from studies.compiled.validate import MODES
from studies.compiled.validation import FOLDER, compared, is_seen, kept_stream, launched, report

Steps = dict[str, list[StepComparison]]


@pytest.fixture(scope="module")
def steps() -> Steps:
    return compared(FOLDER, kept_stream)


def errors(parts: list[Part]) -> list[float]:
    return [abs(part.error) for part in parts if part.error is not None]


def unseen(rows: list[StepComparison]) -> list[StepComparison]:
    return [row for row in rows if row.step.error is not None and not is_seen(row)]


@pytest.mark.parametrize("mode", MODES)
def test_device_time_and_memory_are_as_measured(steps: Steps, mode: str) -> None:
    rows = unseen(steps[mode])
    assert len(rows) == 23
    device, peak = errors([row.device for row in rows]), errors([row.peak for row in rows])
    assert len(device) == len(peak) == 23
    assert median(device) <= 0.013
    assert max(device) <= 0.05
    assert median(peak) <= 0.01
    assert max(peak) <= 0.04


def test_captured_steps_take_the_time_that_is_forecast(steps: Steps) -> None:
    found = errors([row.profile_host_step for row in unseen(steps["compile-graphs"])])
    assert median(found) <= 0.018
    assert sorted(found)[-2] <= 0.045


def test_compiled_steps_take_the_time_that_is_forecast(steps: Steps) -> None:
    rows = unseen(steps["compile"])
    device_bound = errors([row.profile_host_step for row in rows if not row.is_host_bound])
    host_bound = errors([row.step for row in rows if row.is_host_bound])
    assert median(device_bound) <= 0.013
    assert sorted(device_bound)[-2] <= 0.04
    assert median(host_bound) <= 0.10
    assert max(host_bound) <= 0.18


def test_intervals_hold_what_was_measured(steps: Steps) -> None:
    rows = [row for mode in MODES for row in unseen(steps[mode])]
    for parts in ([row.profile_host_step for row in rows], [row.device for row in rows]):
        assert sum(bool(part.is_within) for part in parts) >= 0.9 * len(parts)


@pytest.mark.parametrize("mode", MODES)
def test_as_many_generated_kernels_are_launched_as_were_seen(mode: str) -> None:
    found = launched(FOLDER, mode)
    assert len(found) == 25
    off = {name: abs(told / seen - 1.0) for name, (told, seen) in found.items() if told != seen}
    assert len(off) <= 1
    assert max(off.values()) <= 0.04


def test_the_page_is_what_the_measurements_give(steps: Steps) -> None:
    assert (FOLDER / "README.md").read_text() == report(steps)
