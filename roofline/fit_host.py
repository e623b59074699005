"""Host costs per op from the calibration rows `host/<model>/depth<D>/<phase>`.

A phase's seconds are fixed + per op x ops, over depths. Launches, views and tensors grow together with
depth, so that their costs cannot be told apart by regression: a view is taken as a constant share of a
launch, and in the optimizer a launch as the scalar `launch` measured it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flopcast.roofline.profile import HostCosts, Number

# Host cost of a view over that of an op that launches a kernel: both pass the dispatcher and autograd, the
# view neither allocates nor launches.
VIEW_WEIGHT = 0.4
# Where nothing but `launch` was measured: in a model's forward, Python, autograd and autocast come on top.
FORWARD_OVER_LAUNCH, BACKWARD_OVER_LAUNCH = 2.0, 1.3
LEAST_SIGMA = 0.05  # from one process to the next, even where the samples of one agree


def fit_host(
    rows: Iterable[Mapping[str, Any]],
    counts: Mapping[str, Mapping[str, float]],
    ceilings: Mapping[str, Number],
    machine_host: Mapping[str, Any],
    warnings: list[str],
) -> HostCosts | None:
    """Costs from rows of status ok; `counts` by row key, where the rows themselves carry none.

    Without calibration rows, or without counts: from the scalar `launch`, basis "extrapolated"; None
    without that."""
    launch = ceilings["launch"].value if "launch" in ceilings else None
    cpu = str(machine_host.get("cpu", ""))
    by_phase: dict[str, list[tuple[Mapping[str, Any], Mapping[str, float]]]] = {}
    uncounted = 0
    for row in rows:
        if row["key"].startswith("host/") and row.get("value"):
            phase = row["key"].rsplit("/", 1)[1]
            own = row.get("counts") or counts.get(row["key"]) or {}
            if phase in ("forward", "backward", "optimizer") and not own:
                uncounted += 1
                continue
            by_phase.setdefault(phase, []).append((row, own))
    if uncounted:
        warnings.append(f"{uncounted} host rows have no counts of ops and were left out")
    if not all(phase in by_phase for phase in ("forward", "backward", "optimizer")):
        return None if launch is None else _from_launch(launch, cpu)
    sigmas: list[float] = []
    forward, backward = (_phase(by_phase[phase], sigmas) for phase in ("forward", "backward"))
    optimizer = _optimizer(by_phase["optimizer"], launch or 0.5 * forward["launch"], sigmas)
    zero = [row["value"] for row, _ in by_phase.get("zero_grad", [])]
    return HostCosts(
        name=cpu or "host",
        forward=forward,
        backward=backward,
        optimizer=optimizer,
        step_fixed=float(np.median(zero)) if zero else 0.0,
        sigma=float(max(LEAST_SIGMA, np.median(sigmas))),
        basis="measured",
        cpu=cpu,
    )


def _from_launch(launch: float, cpu: str) -> HostCosts:
    forward, backward = FORWARD_OVER_LAUNCH * launch, BACKWARD_OVER_LAUNCH * launch
    return HostCosts(
        name=cpu or "host",
        forward={"launch": forward, "view": VIEW_WEIGHT * forward, "fixed": 0.0},
        backward={"launch": backward, "view": VIEW_WEIGHT * backward, "fixed": 0.0},
        optimizer={"launch": launch, "per_tensor": 0.2 * launch, "host_op": launch, "fixed": 0.0},
        step_fixed=0.0,
        sigma=0.4,
        basis="extrapolated",
        cpu=cpu,
    )


def _phase(
    rows: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]], sigmas: list[float]
) -> dict[str, float]:
    ops = np.array([c.get("launch", 0.0) + VIEW_WEIGHT * c.get("view", 0.0) for _, c in rows])
    fixed, per_op = _solve(np.column_stack([np.ones(len(ops)), ops]), rows, np.zeros(len(ops)), sigmas)
    return {"launch": per_op, "view": VIEW_WEIGHT * per_op, "fixed": fixed}


def _optimizer(
    rows: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]], launch: float, sigmas: list[float]
) -> dict[str, float]:
    """A foreach step touches its step counters on the host, tensor by tensor; a fused one does not: with
    both measured their costs are told apart, with one of them they share."""
    launched = launch * np.array([c.get("launch", 0.0) for _, c in rows])
    tensors = np.array([c.get("tensors", 0.0) for _, c in rows])
    host = np.array([c.get("host", 0.0) for _, c in rows])
    ones = np.ones(len(rows))
    told_apart = np.linalg.matrix_rank(np.column_stack([ones, tensors, host])) == 3
    if told_apart:
        fixed, per_tensor, host_op = _solve(np.column_stack([ones, tensors, host]), rows, launched, sigmas)
    else:
        fixed, per_tensor = _solve(np.column_stack([ones, tensors + host]), rows, launched, sigmas)
        host_op = per_tensor
    return {"launch": launch, "per_tensor": per_tensor, "host_op": host_op, "fixed": fixed}


def _solve(
    columns: np.ndarray,
    rows: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]],
    known: np.ndarray,
    sigmas: list[float],
) -> list[float]:
    """Non-negative least squares of relative errors; adds the rows' spread and the misfit to `sigmas`."""
    from scipy.optimize import nnls

    seconds = np.array([float(row["value"]) for row, _ in rows])
    found, _ = nnls(columns / seconds[:, None], np.maximum(seconds - known, 0.0) / seconds)
    misfit = np.log(np.maximum(columns @ found + known, 1e-9) / seconds)
    for (row, _), off in zip(rows, misfit, strict=True):
        samples = np.array([s for s in row.get("samples") or [] if s > 0])
        spread = (
            float(np.subtract(*np.quantile(np.log(samples), [0.75, 0.25]))) / 1.349
            if len(samples) > 3
            else 0.0
        )
        sigmas.append(float(np.hypot(spread, off)))
    return [float(value) for value in found]
