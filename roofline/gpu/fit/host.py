"""Fits host costs per op to the calibration rows `host/<model>/depth<D>/<phase>`.

A phase's seconds are modelled over depths as fixed + (seconds per op) x ops. Launches, views and tensors grow together
with depth, so that regression cannot separate their costs: a view is taken as a constant share of a launch, and in the
optimizer a launch costs what the scalar `launch` measured.

Steps in a row take a little more or less than their phases, each timed on an idle device: freeing the graph, the queue,
the caches. Where the tiny models also ran in a row (phase "steady"), all costs are multiplied by that ratio.

A process is one draw (`microbench.hosts.processes`): each is fitted by itself, and several are combined.

The first step after a pause takes longer (H200: forward of 2 layers 4.0 ms, then 2.8), and training has no pauses:
where a row gives its number of rounds, the first sample of each round is left out of the cost, but not of the spread.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from flopcast.microbench.recipe.plans import mode_of, without_process
from flopcast.microbench.recipe.settings import TORCH_MODES
from flopcast.microbench.records.machine import Host, Machine
from flopcast.microbench.records.rows import merged
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.fit.cases import log_spread
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.profile.host import VIEW_WEIGHT, HostCosts, combine
from flopcast.roofline.gpu.profile.host_graphs import ENTERING, Calls, GraphCosts, fit_graph_costs

# Factors on `launch` where nothing else was measured: in a model's forward, Python, autograd and autocast add to it.
FORWARD_OVER_LAUNCH, BACKWARD_OVER_LAUNCH = 2.0, 1.3
LEAST_SIGMA = 0.05  # from one process to the next, even where the samples of one agree
PHASES = ("forward", "backward", "optimizer")
OPERATORS = "host_op/"  # rows of `microbench.hosts.operators`
# Steps in a row over the sum of their phases, each timed by itself: tiny compiled models took 0.92 of it on an H200's
# host, steps of real ones (w1024-d5 and w640-d6-h64 of `validate --mode compile`) 1.03 to 1.10 beside them.
LEAST_STEADY_COMPILED = 1.0
ROUNDS = 5  # assumed where a row does not give its number of rounds


class _Phase(NamedTuple):
    """A phase of a tiny model: its seconds, the spread of their log between samples, its counts of ops by kind."""

    seconds: float
    spread: float
    counts: Mapping[str, float]


def fit_host(
    rows: Iterable[FitRow],
    counts: Mapping[str, Mapping[str, float]],
    ceilings: Mapping[str, Number],
    machine_host: Host,
    warnings: list[str],
) -> HostCosts | None:
    """Fits host costs to rows of status ok; `counts`: ops by row key, for rows that carry none themselves.

    Rows of several processes are fitted one by one and combined. Without calibration rows or counts the costs are
    derived from the scalar `launch`, with basis "extrapolated"; None without that scalar."""
    rows = list(rows)
    others, *processes = by_process(rows)
    hosts = [_fit_process([*own, *others], counts, ceilings, machine_host, warnings) for own in (processes or [[]])]
    found = [host for host in hosts if host is not None]
    measured = [host for host in found if host.basis == "measured"]  # a process that was stopped may lack phases
    return combine(measured) if measured else next(iter(found), None)


def by_process(rows: Iterable[FitRow]) -> list[list[FitRow]]:
    """The rows that are none of tiny models, then those of each process that ran tiny models, with the keys that a
    single process writes."""
    others: list[FitRow] = []
    processes: dict[Any, list[FitRow]] = defaultdict(list)
    for row in rows:
        if not row["key"].startswith("host/"):
            others.append(row)
            continue
        key, process = without_process(row["key"])
        processes[row.get("session"), process].append(merged(FitRow, row, {"key": key}))
    return [others, *processes.values()]


def _fit_process(
    rows: Sequence[FitRow],
    counts: Mapping[str, Mapping[str, float]],
    ceilings: Mapping[str, Number],
    machine_host: Host,
    warnings: list[str],
) -> HostCosts | None:
    compiled = _compiled(rows, counts)
    rows = [row for row in rows if mode_of(row["key"]) == "eager"]
    launch = ceilings["launch"].value if "launch" in ceilings else None
    cpu = str(machine_host.get("cpu", ""))
    calibrated: list[FitRow] = []
    by_phase: dict[str, list[_Phase]] = defaultdict(list)
    uncounted = 0
    for row in rows:
        if row["key"].startswith("host/") and row.get("value"):
            phase = row["key"].rsplit("/", 1)[1]
            own = row.get("counts") or counts.get(row["key"]) or {}
            if phase in PHASES and not own:
                uncounted += 1
                continue
            calibrated.append(row)
            by_phase[phase].append(_Phase(warm_value(row), log_spread(row.get("samples") or []), own))
    if uncounted:
        warnings.append(f"{uncounted} host rows have no counts of ops and were left out")
    triton = operator_costs(rows)
    if not all(phase in by_phase for phase in PHASES):
        return None if launch is None else replace(_from_launch(launch, cpu), triton=triton, compiled=compiled)
    zero_grad = by_phase.get("zero_grad", [])  # walks over the parameters as the optimizer does
    if len(zero_grad) == len(by_phase["optimizer"]):
        pairs = zip(by_phase["optimizer"], zero_grad, strict=True)
        by_phase["optimizer"] = [one._replace(seconds=one.seconds + zero.seconds) for one, zero in pairs]
    sigmas: list[float] = []
    forward, backward = (_phase(by_phase[phase], sigmas) for phase in ("forward", "backward"))
    optimizer = _optimizer(by_phase["optimizer"], launch or 0.5 * forward["launch"], sigmas)
    costs = HostCosts(
        name=host_name(cpu),
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        step_fixed=0.0,
        sigma=float(max(LEAST_SIGMA, np.median(sigmas))),
        basis="measured",
        cpu=cpu,
        layers=layer_costs(calibrated),
        triton=triton,
    )
    return replace(costs.scaled(steady_ratio(rows)), compiled=compiled)


def _compiled(rows: Sequence[FitRow], beside: Mapping[str, Mapping[str, float]]) -> dict[str, GraphCosts]:
    """What the graphs of compiled tiny models cost the host, by mode; a mode without both phases has none. `beside`: by
    row key what costs the host "beyond" the launches that the row counts, in launches."""
    found: dict[str, GraphCosts] = {}
    for mode in TORCH_MODES:
        own = [row for row in rows if mode_of(row["key"]) == mode and row.get("value")]
        measured = []
        for row in own:
            phase, counts = row["key"].rsplit("/", 1)[1], row.get("counts")
            if counts and phase in ("forward", "backward"):
                graphs = counts.get("graph", 1.0)
                entries = (graphs, 0.0) if phase == "forward" else (0.0, graphs)
                launches = counts.get("launch", 0.0) + beside.get(row["key"], {}).get("beyond", 0.0)
                measured.append((Calls(launches, *entries), warm_value(row)))
        if len({bool(calls.forward) for calls, _ in measured}) == 2:
            models = ", ".join(sorted({row["key"].split("/")[1] for row in own}))
            known = ENTERING if mode == "compile" else None
            fitted = fit_graph_costs(measured, f"tiny models: {models}", known)
            found[mode] = fitted.scaled(max(steady_ratio(own), LEAST_STEADY_COMPILED))
    return found


def steady_ratio(rows: Iterable[FitRow]) -> float:
    """Seconds of a tiny model's step in a row of steps over the sum of its phases, median over depths; 1 where no row
    was measured."""
    phases: dict[str, float] = defaultdict(float)
    steady: dict[str, float] = {}
    for row in rows:
        model, _, phase = row["key"].rpartition("/")
        if phase == "steady":
            steady[model] = warm_value(row)
        elif row["key"].startswith("host/") and phase in (*PHASES, "zero_grad"):
            phases[model] += warm_value(row)
    ratios = [seconds / phases[model] for model, seconds in steady.items() if phases.get(model) and seconds]
    return min(max(float(np.median(ratios)), 0.8), 1.25) if ratios else 1.0


def operator_costs(rows: Iterable[FitRow]) -> dict[str, float]:
    """Host seconds per call of each Triton operator in excess of those of the ATen call measured beside it."""
    return {
        row["key"].removeprefix(OPERATORS): max(0.0, value - base)
        for row in rows
        if row["key"].startswith(OPERATORS) and (value := row.get("value")) and (base := row.get("base_seconds"))
    }


def host_name(cpu: str) -> str:
    """flopcast's name of a host, from its processor's name: "Intel(R) Xeon(R) Processor (family 6 model 207)" is
    "intel-xeon-family-6-model-207"."""
    text = re.sub(r"\((r|tm|c)\)|\bprocessor\b|\bcpu\b", " ", cpu.lower())
    return "-".join(re.findall(r"[a-z0-9]+", text)) or "host"


def with_origin(host: HostCosts | None, machine: Machine, rows: Iterable[FitRow]) -> HostCosts | None:
    """Adds the machine, software stack and date of the measurements to the costs."""
    if host is None:
        return None
    days = [row["time"] for row in rows if row.get("time") and row["key"].startswith(("host/", "scalar/launch"))]
    described = machine.get("host", {})
    return replace(
        host, cores=described.get("cores"), device=str(machine.get("device", {}).get("name") or ""),
        date=max(days, default="")[:10], stack=dict(machine.get("stack", {})),
    )  # fmt: skip


# --- by layer


def layer_costs(rows: Iterable[FitRow]) -> dict[str, Any]:
    """Host seconds per layer of the calibrated model in eager mode.

    Returns {"model", "mode", "depths", and per phase, and for "step", which is their sum, {"seconds", "fixed", "low",
    "high", "between"}}. `seconds` is the slope over depths, `fixed` the intercept at depth 0; `low` and `high` are the
    least and the greatest slope of a single round; `between` is the slope from each depth to the next ("2-6"). Of
    several models the one with most depths is used; empty with fewer than two depths.
    """
    found: dict[str, dict[str, dict[int, FitRow]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        parsed = re.fullmatch(r"host/(.+)/depth(\d+)/(\w+)", row["key"])
        if parsed and row.get("value"):
            found[parsed[1]][parsed[3]][int(parsed[2])] = row
    whole = {
        model: sorted(set.intersection(*(set(phases[phase]) for phase in PHASES))) for model, phases in found.items()
    }
    model = max(whole, key=lambda model: len(whole[model]), default="")
    depths = whole.get(model, [])
    if len(depths) < 2:
        return {}
    phases = found[model]
    by_round = {phase: {depth: round_medians(phases[phase][depth]) for depth in depths} for phase in PHASES}
    values = {phase: [warm_value(phases[phase][depth]) for depth in depths] for phase in PHASES}
    values["step"] = [sum(parts) for parts in zip(*(values[phase] for phase in PHASES), strict=True)]
    count = min(len(medians) for own in by_round.values() for medians in own.values())
    rounds = {phase: [[by_round[phase][depth][i] for depth in depths] for i in range(count)] for phase in PHASES}
    rounds["step"] = [
        [sum(parts) for parts in zip(*(rounds[phase][i] for phase in PHASES), strict=True)] for i in range(count)
    ]
    layers: dict[str, Any] = {"model": model, "mode": "eager", "depths": depths}
    for phase, seconds in values.items():
        slope, fixed = (float(value) for value in np.polyfit(depths, seconds, 1))
        slopes = [float(np.polyfit(depths, own, 1)[0]) for own in rounds[phase]]
        steps = pairwise(zip(depths, seconds, strict=True))
        layers[phase] = {
            # the noise of a busy machine can turn a slope below zero, where no cost is
            "seconds": max(slope, 0.0),
            "fixed": max(fixed, 0.0),
            "low": max(min(slopes), 0.0),
            "high": max(*slopes, 0.0),
            "between": {f"{a}-{b}": float((t - s) / (b - a)) for (a, s), (b, t) in steps},
        }
    return layers


def round_medians(row: FitRow) -> list[float]:
    """The median of each round's warm samples; of ROUNDS equal parts where the row does not give its rounds."""
    samples = [float(sample) for sample in row.get("samples") or [row.get("value") or 0.0]]
    told = row.get("rounds")
    parts = np.array_split(np.array(samples), min(told or ROUNDS, len(samples)))
    return [float(np.median(part[1:] if told and len(part) > 1 else part)) for part in parts]


def warm_value(row: FitRow) -> float:
    """The median of a row's samples without the first of each round, where it gives its rounds; else its value."""
    told, samples = row.get("rounds"), row.get("samples") or []
    if not told or len(samples) != row.get("n") or len(samples) < 2 * told:
        return float(row.get("value") or 0.0)
    parts = np.array_split(np.array(samples, float), told)
    return float(np.median(np.concatenate([part[1:] for part in parts])))


def _from_launch(launch: float, cpu: str) -> HostCosts:
    forward, backward = FORWARD_OVER_LAUNCH * launch, BACKWARD_OVER_LAUNCH * launch
    return HostCosts(
        name=host_name(cpu),
        forward={"launch": forward, "view": VIEW_WEIGHT * forward, "fixed": 0.0},
        backward={"launch": backward, "view": VIEW_WEIGHT * backward, "fixed": 0.0},
        optimizer={"launch": launch, "per_tensor": 0.2 * launch, "host_op": launch, "fixed": 0.0},
        step_fixed=0.0,
        sigma=0.4,
        basis="extrapolated",
        cpu=cpu,
    )


def _phase(phases: Sequence[_Phase], sigmas: list[float]) -> dict[str, float]:
    ops = np.array([one.counts.get("launch", 0.0) + VIEW_WEIGHT * one.counts.get("view", 0.0) for one in phases])
    fixed, per_op = _solve(np.column_stack([np.ones(len(ops)), ops]), phases, np.zeros(len(ops)), sigmas)
    return {"launch": per_op, "view": VIEW_WEIGHT * per_op, "fixed": fixed}


def _optimizer(phases: Sequence[_Phase], launch: float, sigmas: list[float]) -> dict[str, float]:
    """Host costs of the optimizer's step.

    A foreach step updates its step counters on the host, tensor by tensor; a fused one does not. With both measured,
    the costs per tensor and per host op are fitted separately; with one of them, both take one common value."""
    launched = launch * np.array([one.counts.get("launch", 0.0) for one in phases])
    tensors = np.array([one.counts.get("tensors", 0.0) for one in phases])
    host = np.array([one.counts.get("host", 0.0) for one in phases])
    ones = np.ones(len(phases))
    told_apart = np.linalg.matrix_rank(np.column_stack([ones, tensors, host])) == 3
    if told_apart:
        fixed, per_tensor, host_op = _solve(np.column_stack([ones, tensors, host]), phases, launched, sigmas)
    else:
        fixed, per_tensor = _solve(np.column_stack([ones, tensors + host]), phases, launched, sigmas)
        host_op = per_tensor
    return {"launch": launch, "per_tensor": per_tensor, "host_op": host_op, "fixed": fixed}


def _solve(columns: np.ndarray, phases: Sequence[_Phase], known: np.ndarray, sigmas: list[float]) -> list[float]:
    """Minimizes squared relative errors with non-negative costs; adds each phase's spread and misfit to `sigmas`."""
    from scipy.optimize import nnls

    seconds = np.array([one.seconds for one in phases])
    found, _ = nnls(columns / seconds[:, None], np.maximum(seconds - known, 0.0) / seconds)
    misfit = np.log(np.maximum(columns @ found + known, 1e-9) / seconds)
    sigmas += [float(np.hypot(one.spread, off)) for one, off in zip(phases, misfit, strict=True)]
    return [float(value) for value in found]
