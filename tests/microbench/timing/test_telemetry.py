"""Throttle reasons and readings, without a GPU."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.microbench.timing.telemetry import Reading, is_throttled, telemetry, throttle_names, typical_reading

CPU = torch.device("cpu")


@given(st.integers(0, 0xFFFF))
def test_every_bit_of_a_throttle_mask_is_named(mask: int) -> None:
    assert len(throttle_names(mask)) == mask.bit_count()


def test_idle_and_user_clocks_are_no_throttling_heat_and_power_are() -> None:
    assert not is_throttled(throttle_names(0x1 | 0x2 | 0x10 | 0x100))
    for bit in (0x4, 0x8, 0x20, 0x40, 0x80):
        assert is_throttled(throttle_names(bit | 0x1))
    assert throttle_names(0x24) == ("sw_power_cap", "sw_thermal_slowdown")


def test_readings_fit_a_row() -> None:
    row = telemetry(CPU)().as_row()
    assert row["throttled"] is False
    assert row["throttle_reasons"] == []
    assert json.dumps(row)


def test_readings_of_one_case_become_one_with_every_throttle_reason_seen() -> None:
    def reading(clock: float | None, *reasons: str) -> Reading:
        return Reading(clock_mhz=clock, power_w=500.0, throttle_reasons=reasons)

    idle, busy = reading(345.0, "gpu_idle"), reading(1980.0)
    assert typical_reading([]) == Reading()
    assert typical_reading([idle]) == idle
    assert typical_reading([idle, busy]) == busy
    hot = [reading(1700.0, "sw_power_cap"), reading(1650.0, "sw_power_cap", "hw_thermal_slowdown")]
    found = typical_reading([idle, busy, *hot])
    assert (found.clock_mhz, found.power_w) == (1700.0, 500.0)
    assert found.throttle_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert found.throttled
    assert typical_reading([idle, reading(None)]).clock_mhz is None
