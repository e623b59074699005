"""Estimates host costs as they were while real steps ran, from the tiny models that were run between them.

Host speed differs by 10 to 40% from process to process and drifts within one: a step that was 10.7% slow had the tiny
models beside it 6 to 9% slow. The tiny models also show how well neighbouring samples predict the host between them:
each visit to them is compared with the visits before and after it (`RunHost.sigma`; 5 to 12% in five runs).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, hypot, log, sqrt
from statistics import fmean, median, variance
from typing import cast

from flopcast.microbench.recipe.plans import HostPlan
from flopcast.microbench.records.rows import HostRow, Row, merged
from flopcast.roofline.gpu.fit.host import OPERATORS, fit_host
from flopcast.roofline.gpu.fit.host_calibration import calibration_counts, host_plan
from flopcast.roofline.gpu.fit.row_seconds import FitRow
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.uncertainty import spreads

# Samples on either side of a step that give the host's speed then: two per phase are taken before each step; of steps
# in a row, from which `pace` is taken, it is one sample, written twice.
NEAR = 2
LEAST_VISITS = 8  # with fewer, sigma is not estimated but is RESTLESS, as in five runs of three machines
RESTLESS = 0.1


@dataclass(frozen=True)
class RunHost:
    """The host of one run of steps: its costs, and its speed sample by sample.

    `pace[i]` is sample i of the tiny models over their median, averaged over depths and phases. `noise` is the standard
    deviation of its logarithm, from the differences between the depths, which are timed one after the other. `usual`:
    the median seconds of a step of the model of middle depth, which `host_pace` of rows compares with.
    """

    costs: HostCosts
    pace: tuple[float, ...]
    noise: float = 0.0
    usual: float | None = None

    @cached_property
    def sigma(self) -> float:
        """Root-mean-square error, in logarithms, of predicting the host at one time from the samples before and after
        it, over the run's own samples: the host at a step is predicted in the same way. `noise` is subtracted, since a
        sample lasts tenths of a second and a step is timed for seconds."""
        visits = [fmean(map(log, self.pace[i : i + NEAR])) for i in range(0, len(self.pace), NEAR)]
        if len(visits) < LEAST_VISITS:
            return RESTLESS
        off = [
            (here - (before + after) / 2) ** 2
            for before, here, after in zip(visits, visits[1:], visits[2:], strict=False)
        ]
        return sqrt(max(fmean(off) - self.noise**2, 0.0))

    def at(self, samples_before: int | None, between: Sequence[float] = ()) -> HostCosts:
        """The host costs at a step, scaled by the samples `between` its rounds, else by those just before and just
        after it. Their deviation combines `sigma` with the further error of steps forecast with the host of their own
        run."""
        if samples_before is None or not self.pace:
            return self.costs
        near = self.pace[max(0, samples_before - NEAR) : samples_before + NEAR]
        if between and self.usual:
            near = tuple(seconds / self.usual for seconds in between)
        if not near:
            return self.costs
        costs = self.costs.scaled(median(near))
        return replace(
            costs, sigma=hypot(spreads().host_same_run, self.sigma),
            compiled={mode: replace(one, sigma=self.sigma) for mode, one in costs.compiled.items()},
        )  # fmt: skip


def hosts_of_runs(measured: Iterable[Row], profile: Profile) -> dict[str | None, RunHost]:
    """Host costs of the processes that ran the steps, by session, from the calibration rows among the steps.

    Empty without such rows, and on a CPU.
    """
    kind = str(profile.device.get("type"))
    sessions: dict[str | None, dict[str, Row]] = defaultdict(dict)
    for row in measured:
        if row["key"].startswith(("host/", OPERATORS)) and row["status"] == "ok":
            sessions[row.get("session")][row["key"]] = row
    if not sessions or kind == "cpu":
        return {}
    plan = host_plan(kind)
    counts = calibration_counts(kind)
    cpu = profile.host.cpu if profile.host is not None else ""
    found: dict[str | None, RunHost] = {}
    for session, by_key in sessions.items():
        rows = list(by_key.values())
        if all(row["key"].startswith(OPERATORS) for row in rows):  # the run stopped before its tiny models were written
            continue
        usual = _usual(plan, rows)
        fitted = [_at_usual_pace(row, usual) for row in rows]
        costs = fit_host(cast(list[FitRow], fitted), counts, profile.ceilings, {"cpu": cpu}, [])
        if costs is not None:
            if not costs.triton and profile.host is not None:  # no step of the run needed it
                costs = replace(costs, triton=profile.host.triton)
            found[session] = RunHost(costs, *_pace(rows), usual)
    return found


def _usual(plan: HostPlan, rows: Iterable[Row]) -> float | None:
    """Median seconds of a step of the tiny model of middle depth, among steps in a row."""
    depths = sorted(plan.configs)
    key = plan.row_key(depths[len(depths) // 2], "steady")
    return next((row.get("value") for row in rows if row["key"] == key), None)


def _at_usual_pace(row: Row, usual: float | None) -> Row:
    """The row of a compiled tiny model as if the host had run at its usual pace in each round."""
    between, samples = cast(HostRow, row).get("host_pace"), row.get("samples") or ()
    if not between or not usual or len(samples) % len(between):
        return row
    each = len(samples) // len(between)
    scaled = [sample * usual / between[number // each] for number, sample in enumerate(samples)]
    return merged(Row, row, {"samples": scaled, "value": median(scaled)})


def _pace(rows: Sequence[Row]) -> tuple[tuple[float, ...], float]:
    """Returns (pace, noise) of a `RunHost`: each sample over its row's median, geometric mean over rows. The rows are
    those of steps in a row, timed like the steps beside them, or, in files of older versions, of forward and
    backward on an idle device (most of a step)."""
    measured = [(row["key"], value, row["samples"]) for row in rows if (value := row.get("value"))]
    chosen = [row for row in measured if row[0].endswith("/steady")]
    chosen = chosen or [row for row in measured if row[0].endswith(("/forward", "/backward"))]
    logs = list(zip(*([log(sample / value) for sample in samples] for _, value, samples in chosen), strict=False))
    if not logs or len(chosen) < 2:
        return tuple(exp(values[0]) for values in logs), 0.0
    noise = sqrt(fmean(variance(values) for values in logs) / len(chosen))
    return tuple(exp(fmean(values)) for values in logs), noise
