"""Fits what the host spends on the graphs of compiled steps, and says how far each recorded step is off.

    python -m studies.compiled.host           the table
    python -m studies.compiled.host --write   writes the costs into the shipped host, too

The shipped host's costs of "compile" are the mean of MACHINES, on each of which tiny compiled models ran beside eager
ones: times how much longer the shipped host takes for an eager layer. None of them ran a step of the validation. Those
of "compile-graphs" are fitted to the recorded steps: of a kernel's share tiny models, which have few, tell nothing.

Each recorded step was timed phase by phase on an idle device, with up to three other processes on the host, so that the
costs say little of an idle host's. `zero_grad` was timed with the forward: what the
shipped host's optimizer takes longer than the recorded one is taken to be it. A phase that launched more than the queue
holds is left out where the device was busy: the host then waited for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from statistics import fmean, median, stdev
from typing import Any

from flopcast.roofline.gpu.fit.folder import fit_host_folder
from flopcast.roofline.gpu.profile.host import DEFAULT, HOSTS, HostCosts, default_host
from flopcast.roofline.gpu.profile.host_graphs import (
    GIVEN,
    GRADIENT,
    HEAVIER_CALLS,
    MODES,
    Calls,
    GraphCosts,
    fit_graph_costs,
    is_dense_nchw,
    mean_graph_costs,
)
from flopcast.roofline.step.timeline import QUEUE_DEPTH
from flopcast.roofline.stream.compiled.launches import Graph
from studies.command import parser_of
from studies.compiled.record import CASES
from studies.compiled.recorded import FOLDER, graphs_of, record_of
from studies.imports import ROOT
from studies.markdown import table

# Hosts of H200s that ran none of the compiled steps by which forecasts are judged.
MACHINES = tuple(
    ROOT / "reports" / folder
    for folder in ("nvidia-h200/launch-cost/host", "parallel/host-3", "nvidia-h200/compiled-validation/broken/host")
)
SHORT_SECONDS = 20e-6  # of a kernel, at the mean
SEVERAL_CALLS = ("qwen3-moe-l2",)  # its step runs graphs several times, which the record does not tell


@dataclass(frozen=True)
class Phase:
    """A phase of a recorded step: which graphs it enters, what they launch, and the host's seconds for it."""

    case: str
    calls: Calls
    seconds: float


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--write", action="store_true", help=f"write them into the shipped host, {DEFAULT}")
    given = parser.parse_args()
    phases = recorded_phases()
    for mode in MODES:
        print(f"\n{mode}: {words(fitted(phases[mode]), deviation(phases[mode]))}\n")
        print(table(["step", "launches", "host, ms", "held out, ms", "error"], rows_of(phases[mode])))
    print("\nwith CUDA graphs, microseconds per kernel that steps of short kernels took beyond their kernels:")
    print(", ".join(f"{case} {seconds * 1e6:.2f}" for case, seconds in node_gaps()))
    if given.write:
        host = with_compiled(default_host(), phases)
        host.save(HOSTS / f"{DEFAULT}.json")
        print(f"\nwrote {host.name}")


def with_compiled(host: HostCosts, phases: dict[str, list[Phase]] | None = None) -> HostCosts:
    """The shipped host with the costs of graphs."""
    recorded = recorded_host(host, phases).compiled["compile-graphs"]
    return replace(host, compiled={"compile": of_machines(host, recorded.sigma), "compile-graphs": recorded})


def recorded_host(host: HostCosts, phases: dict[str, list[Phase]] | None = None) -> HostCosts:
    """The host with the costs of graphs that the recorded steps had. These are of one machine, and stand for another
    one, whose differ as its eager costs do."""
    machines = [log(seconds) for seconds in host.layers.get("step", {}).get("machines", ())]
    sigma = sqrt(2.0) * stdev(machines) if len(machines) > 1 else host.sigma
    found = {mode: fitted(own) for mode, own in (phases or recorded_phases(host)).items()}
    return replace(host, compiled={mode: replace(one, sigma=sigma) for mode, one in found.items()})


def of_machines(host: HostCosts, sigma: float) -> GraphCosts:
    """The mean of what compiled tiny models cost the machines, at the shipped host's pace of an eager layer."""
    found = []
    for folder in MACHINES:
        own = fit_host_folder(folder)
        found.append(own.compiled["compile"].scaled(eager_layer(host) / eager_layer(own)))
    return replace(mean_graph_costs(found, sigma), source=f"tiny models on {len(found)} machines")


def eager_layer(host: HostCosts) -> float:
    """Host seconds of a layer of the calibrated model, forward and backward."""
    forward, backward = (float(host.layers[phase]["seconds"]) for phase in ("forward", "backward"))
    return forward + backward


def recorded_phases(host: HostCosts | None = None) -> dict[str, list[Phase]]:
    """The phases of all recorded steps that were timed, by mode."""
    host = host or default_host()
    found: dict[str, list[Phase]] = {mode: [] for mode in MODES}
    for case in CASES:
        record = record_of(FOLDER, case.name)
        timed: dict[str, Any] = {mode: times for mode, times in record["timed"].items() if "forward_seconds" in times}
        if not timed or case.name in SEVERAL_CALLS:
            continue
        graphs = graphs_of(FOLDER, case.name)
        optimizer = optimizer_seconds(graphs, host)
        busy = sum(seconds for _, seconds in record["kernels"]["compile"])
        for mode, times in timed.items():
            seconds = {phase: median(times[f"{phase}_seconds"]) for phase in ("forward", "backward", "optimizer")}
            zero_grad = max(optimizer - seconds["optimizer"], 0.0)
            forward = calls_of([graph for graph in graphs if not graph.is_backward], mode)
            backward = calls_of([graph for graph in graphs if graph.is_backward], mode)
            found[mode].append(Phase(case.name, forward, max(seconds["forward"] - zero_grad, 0.0)))
            spent = seconds["forward"] + seconds["backward"]
            launched = sum(len(graph.launches) for graph in graphs)
            has_waited = mode == "compile" and launched > QUEUE_DEPTH and busy > spent
            if not has_waited:
                found[mode].append(Phase(case.name, backward, seconds["backward"]))
    return found


def node_gaps() -> list[tuple[str, float]]:
    """By recorded step with CUDA graphs, whose kernels are short: seconds per kernel beyond its kernels. Long kernels
    meet the power limit too, which says nothing of gaps."""
    found = []
    for case in CASES:
        record = record_of(FOLDER, case.name)
        times, kernels = record["timed"].get("compile-graphs"), record["kernels"]["compile"]
        busy = sum(seconds for _, seconds in kernels)
        if times and busy < SHORT_SECONDS * len(kernels):
            found.append((case.name, (median(times["step_seconds"]) - busy) / len(kernels)))
    return found


def optimizer_seconds(graphs: Sequence[Graph], host: HostCosts) -> float:
    """Host seconds of the fused AdamW that follows, `zero_grad` included, of a tensor for each result of the backward:
    its calls take the lists of parameters, gradients and two states, and twice that of step counts."""
    tensors = sum(name != "None" for graph in graphs if graph.is_backward for name in graph.outputs)
    return host.optimizer["fixed"] + host.seconds("optimizer", "launch", launches=2, tensors=6 * tensors)


def calls_of(graphs: Sequence[Graph], mode: str) -> Calls:
    backward = sum(graph.is_backward for graph in graphs)
    launches = sum(len(graph.launches) if mode == "compile-graphs" else worth(graph) for graph in graphs)
    return Calls(launches, len(graphs) - backward, backward)


def worth(graph: Graph) -> float:
    """The launches that a graph costs, with those that its tensors or gradients and its heavier calls do."""
    gradients = sum(name != "None" for name in graph.outputs)
    found = len(graph.launches) + (GRADIENT * gradients if graph.is_backward else GIVEN * len(graph.inputs))
    for launch in graph.launches:
        if heavier := HEAVIER_CALLS.get("aten." + launch.name.removeprefix("aten.")):
            found += heavier[0 if is_dense_nchw(*launch.operands[:2]) else 1]
    return found


def fitted(phases: Sequence[Phase]) -> GraphCosts:
    """The costs by all phases."""
    cases = list(dict.fromkeys(phase.case for phase in phases))
    source = f"{len(cases)} recorded steps of one machine that other work shared"
    return fit_graph_costs([(phase.calls, phase.seconds) for phase in phases], source)


def deviation(phases: Sequence[Phase]) -> float:
    """Of the log host seconds of whole steps held out one by one."""
    return sqrt(fmean(log(told / seconds) ** 2 for _, seconds, told in held_out(phases)))


def held_out(phases: Sequence[Phase]) -> list[tuple[str, float, float]]:
    """(step, its host seconds, what the other steps' costs make of it), of the phases that count."""
    found = []
    for case in dict.fromkeys(phase.case for phase in phases):
        own = [phase for phase in phases if phase.case == case]
        costs = fit_graph_costs([(phase.calls, phase.seconds) for phase in phases if phase.case != case])
        found.append((case, sum(one.seconds for one in own), sum(costs.seconds(one.calls) for one in own)))
    return found


def rows_of(phases: Sequence[Phase]) -> list[list[str]]:
    launches = {case: sum(one.calls.launches for one in phases if one.case == case) for case, _, _ in held_out(phases)}
    return [
        [case, f"{launches[case]:,.0f}", f"{seconds * 1e3:.2f}", f"{told * 1e3:.2f}", f"{told / seconds - 1.0:+.0%}"]
        for case, seconds, told in held_out(phases)
    ]


def words(costs: GraphCosts, off: float) -> str:
    parts = (f"{getattr(costs, name) * 1e6:.1f} us per {name}" for name in ("launch", "forward", "backward"))
    return f"{', '.join(parts)}; steps held out have a deviation of {off:.0%}"


if __name__ == "__main__":
    main()
