"""Host costs of compiled graphs, held to the recorded steps: those that were held out, and the shipped host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log, sqrt
from statistics import fmean

import pytest

from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.gpu.profile.host_graphs import MODES
from studies.compiled.host import Phase, fitted, held_out, node_gaps, recorded_phases, with_compiled

MOST = {"compile": 0.34, "compile-graphs": 0.42}


@cache
def phases() -> dict[str, list[Phase]]:
    return recorded_phases()


def deviation(own: Sequence[Phase]) -> float:
    return sqrt(fmean(log(told / seconds) ** 2 for _, seconds, told in held_out(own)))


@pytest.mark.parametrize("mode", MODES)
def test_steps_held_out_are_as_near_as_the_shipped_deviation_says(mode: str) -> None:
    own = phases()[mode]
    assert deviation(own) < MOST[mode]
    without_entries = [
        Phase(one.case, one.calls._replace(forward=0.0, backward=0.0), one.seconds) for one in own
    ]  # launches alone explain less
    assert deviation(without_entries) > deviation(own)


def test_the_shipped_host_is_what_the_records_give() -> None:
    host = default_host()
    for mode, costs in with_compiled(host, phases()).compiled.items():
        shipped = host.compiled[mode]
        for name in ("launch", "forward", "backward", "sigma"):
            assert getattr(shipped, name) == pytest.approx(getattr(costs, name), rel=1e-6)


def test_a_replay_costs_less_than_launching() -> None:
    eager, captured = (fitted(phases()[mode]) for mode in MODES)
    assert captured.launch < 0.5 * eager.launch


def test_captured_steps_have_small_gaps() -> None:
    assert all(-0.2e-6 < seconds < 0.8e-6 for _, seconds in node_gaps())
    assert len(node_gaps()) == 3
