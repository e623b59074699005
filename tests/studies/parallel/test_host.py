"""What Python spends around calls in parallel steps, as the measured phases of tiny models say."""

from __future__ import annotations

from math import exp

import pytest

from flopcast.roofline.gpu.profile.host import CALL_OVER_FORWARD
from flopcast.roofline.step.communication import CALLS_SIGMA, DIVIDED_CALLS, RING_CALLS, SHARDED_CALLS
from studies.parallel import phases
from studies.parallel.host import RING, hosts_of, print_adapters_and_muon, processes, ring_calls, tiny_calls


@pytest.mark.parametrize(("host", "count"), [*zip(phases.HOSTS, (8, 2, 4, 2, 4), strict=True)])
def test_every_process_that_was_started_has_rows_of_both_depths_without_a_fault(host: phases.Host, count: int) -> None:
    rows = phases.read(host)
    assert not [row for row in rows if "fault" in row]
    tiny = [row for row in rows if "step" not in row and row["mode"] == "eager"]
    for key in {(row["launch"], row["rank"], row["layout"]) for row in tiny}:
        depths = {row["depth"] for row in tiny if (row["launch"], row["rank"], row["layout"]) == key}
        assert depths == set(phases.DEPTHS)
    assert len(processes(host)) == count


@pytest.mark.parametrize("layout", ["fsdp={n}", "zero2={n}", "tp={n}", RING])
def test_a_layout_costs_the_host_more_than_its_calls_in_every_phase(layout: str) -> None:
    assert all(calls > 0 for calls in tiny_calls(phases.HOSTS[0], layout).values())


def test_the_constants_lie_between_the_hosts() -> None:
    """FSDP's per layer: between three collectives as the first host had them, of 32 calls, and what tiny models say."""
    each = sum(SHARDED_CALLS.values())
    hosts = [tiny_calls(host, "fsdp={n}") for host in hosts_of("fsdp={n}")]
    assert len(hosts) == 3
    assert all(3 * 32 < each < host["forward"] + host["backward"] for host in hosts)
    assert hosts[-1]["forward"] + hosts[-1]["backward"] < each * exp(1.64 * CALLS_SIGMA), "a host that judges"
    ring = [ring_calls(host) for host in hosts_of(RING)]
    assert min(ring) < RING_CALLS < max(ring)
    assert DIVIDED_CALLS["forward"] > DIVIDED_CALLS["backward"] > 2.65


def test_adapters_and_muon_cost_what_is_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a host that judges: a collective of layers of 25 parameters no more than one of 11, and a call of Muon's what
    `CALL_OVER_FORWARD` says."""
    pytest.importorskip("peft")
    host = phases.HOSTS[-1]
    print_adapters_and_muon(host)
    assert f"a call of Muon's: {CALL_OVER_FORWARD}" in capsys.readouterr().out
    plain, adapted = (sum(tiny_calls(host, f"fsdp={{n}}{more}").values()) for more in ("", "+lora"))
    assert plain < adapted < 1.3 * plain
