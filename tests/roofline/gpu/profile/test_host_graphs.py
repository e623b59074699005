"""Host costs of compiled steps: fitted, derived for hosts that lack them, kept in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flopcast.roofline.gpu.profile.host import (
    NO_HOST,
    PROCESS_DEGREES,
    PROCESS_SPREAD,
    HostCosts,
    combine,
    default_host,
    sigma_of_another,
)
from flopcast.roofline.gpu.profile.host_graphs import MODES, Calls, Entry, GraphCosts, fit_graph_costs

COSTS = GraphCosts(launch=10e-6, forward=1e-3, backward=2e-3, sigma=0.3)
PHASES = [Calls(100, 1, 0), Calls(200, 0, 1), Calls(1000, 1, 0), Calls(50, 0, 4)]


def test_exact_phases_give_their_costs_back() -> None:
    found = fit_graph_costs([(calls, COSTS.seconds(calls)) for calls in PHASES])
    assert (found.launch, found.forward, found.backward) == pytest.approx((10e-6, 1e-3, 2e-3))


def test_what_is_known_of_entering_counts_for_more_the_less_the_phases_tell() -> None:
    """Depths that lie far apart tell entering from launching by themselves; two that are alike do not."""
    known = (Entry(80.0, 0.3), Entry(160.0, 0.3))  # of these costs entering takes 100 and 200 launches
    apart = [Calls(1, 1, 0), Calls(1000, 1, 0), Calls(1, 0, 1), Calls(1000, 0, 1)]
    alike = [Calls(2000, 1, 0), Calls(2001, 1, 0), Calls(2000, 0, 1), Calls(2001, 0, 1)]
    found = {
        name: fit_graph_costs([(calls, COSTS.seconds(calls)) for calls in phases], entering=known)
        for name, phases in (("apart", apart), ("alike", alike))
    }
    assert found["apart"].forward / found["apart"].launch == pytest.approx(100, rel=0.06)
    assert found["alike"].forward / found["alike"].launch == pytest.approx(80, rel=0.04)
    assert found["alike"].backward / found["alike"].launch == pytest.approx(160, rel=0.04)
    for calls in alike:
        assert found["alike"].seconds(calls) == pytest.approx(COSTS.seconds(calls), rel=0.05)


def test_no_phases_no_costs() -> None:
    with pytest.raises(ValueError, match="no phases"):
        fit_graph_costs([])


@pytest.mark.parametrize("mode", MODES)
def test_a_host_without_compiled_steps_takes_the_shipped_costs_by_its_eager_ones(mode: str) -> None:
    shipped = default_host()
    slow = replace(shipped.scaled(1.5), compiled={})
    found, known = slow.graph_costs(mode), shipped.graph_costs(mode)
    assert found.launch == pytest.approx(1.5 * known.launch)
    assert found.sigma > known.sigma
    assert NO_HOST.graph_costs(mode).seconds(Calls(100, 1, 1)) == 0.0


def test_processes_are_combined_and_the_next_one_may_differ() -> None:
    host = replace(default_host(), layers={}, compiled={"compile": COSTS})
    other = replace(host, compiled={"compile": COSTS.scaled(2.0)})
    found = combine([host, other]).compiled["compile"]
    assert found.launch == pytest.approx(15e-6)
    assert found.sigma == sigma_of_another((), PROCESS_SPREAD, PROCESS_DEGREES)


def test_a_file_keeps_the_costs(tmp_path: Path) -> None:
    host = replace(default_host(), compiled={"compile": COSTS})
    host.save(tmp_path / "host.json")
    assert HostCosts.load(tmp_path / "host.json").compiled == {"compile": COSTS}
