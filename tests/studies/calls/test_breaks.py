"""What a further graph of layers that break costs the host is what stacks of them were measured to."""

from __future__ import annotations

from statistics import fmean

import pytest

from flopcast.roofline.gpu.profile.host_graphs import MODES
from flopcast.roofline.step.graph_launches import FURTHER_GRAPH
from studies.calls.breaks import LINEARS, PIECES, RUNS, a_layer, further_graph, kept, launch_seconds
from studies.calls.turns import PHASES


@pytest.mark.parametrize("mode", MODES)
def test_a_further_graph_costs_what_was_measured(mode: str) -> None:
    for phase, share in zip(PHASES, FURTHER_GRAPH[mode], strict=True):
        assert fmean(further_graph(mode, phase, run) for run in RUNS[mode]) == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize(("mode", "run"), [(mode, run) for mode, runs in RUNS.items() for run in runs])
def test_the_more_pieces_a_layer_breaks_into_the_longer_the_host_takes(mode: str, run: str) -> None:
    found = kept(mode, run)
    for phase in PHASES:
        for linears in LINEARS:
            seconds = [a_layer(found, f"in {pieces}/{linears} linears", phase)[0] for pieces in PIECES[::2]]
            assert seconds[0] < seconds[1]


@pytest.mark.parametrize("run", RUNS["compile"])
def test_a_launch_costs_as_much_whatever_its_stack(run: str) -> None:
    found = kept("compile", run)
    for phase in PHASES:
        each = [
            seconds / launches for seconds, launches, _ in (a_layer(found, f"in 1/{n} linears", phase) for n in LINEARS)
        ]
        assert each == pytest.approx([launch_seconds(found, phase)] * len(LINEARS), rel=0.15)
