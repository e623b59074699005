"""What Python spends around calls in parallel steps, as the measured phases of tiny models say."""

from __future__ import annotations

import pytest

from flopcast.roofline.step.communication import DIVIDED_CALLS, RING_CALLS, SHARDED_CALLS
from studies.parallel import phases
from studies.parallel.host import PHASES, RING, processes, tiny_calls


def test_every_process_that_was_started_has_rows_of_both_depths_without_a_fault() -> None:
    rows = phases.read()
    assert not [row for row in rows if "fault" in row]
    tiny = [row for row in rows if "step" not in row and row["mode"] == "eager"]
    for key in {(row["launch"], row["rank"], row["layout"]) for row in tiny}:
        depths = {row["depth"] for row in tiny if (row["launch"], row["rank"], row["layout"]) == key}
        assert depths == set(phases.DEPTHS)
    assert len(processes()) == 8


@pytest.mark.parametrize("layout", ["fsdp={n}", "zero2={n}", "tp={n}", RING])
def test_a_layout_costs_the_host_more_than_its_calls_in_every_phase(layout: str) -> None:
    assert all(calls > 0 for calls in tiny_calls(layout).values())


def test_the_constants_lie_between_the_hosts() -> None:
    """FSDP's per layer: between three collectives as the first host had them, of 37 calls, and the tiny models'."""
    sharded = tiny_calls("fsdp={n}")
    each = sum(SHARDED_CALLS.values())
    assert 3 * 37 < each < sharded["forward"] + sharded["backward"]
    beside, ring = tiny_calls("fsdp={n}", RING), tiny_calls(RING)
    beyond = sum(ring[phase] - beside[phase] for phase in PHASES[:2])
    assert beyond / 4 == pytest.approx(RING_CALLS, rel=0.05)
    assert DIVIDED_CALLS["forward"] > DIVIDED_CALLS["backward"] > 2.65
