"""How many fresh processes a host's calibration takes: that of some processes judged by the host-bound steps of others.

Each choice of one, two or four of a machine's processes is fitted as `flopcast bench --suite host` fits its four, and
forecasts the steps of three other processes of that machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean

from flopcast.microbench.recipe.plans import without_process
from flopcast.microbench.records import records
from flopcast.microbench.records.rows import StepRow, select
from flopcast.roofline.gpu.fit.cards import Found, read_folder
from flopcast.roofline.gpu.fit.folder import fit_host_folder
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.validation.compare_steps import plan_of, stream_of

COUNTS = (1, 2, 4)
# Machine by machine, the processes that ran before its steps; six more of the first ran after them.
BEFORE = {"1": range(6), "2": range(5)}
RUNS = ("run0", "run1", "run2")


@dataclass(frozen=True)
class Judged:
    """Hosts of `count` processes of a machine: how many hosts, how many forecasts of host-bound steps they made and how
    many of these held, and the mean width of the intervals as a share of the forecast."""

    machine: str
    count: int
    hosts: int
    inside: int
    steps: int
    width: float


def judge(folder: Path) -> list[Judged]:
    """Judges the machines of a folder `host-processes` by every choice of COUNTS processes."""
    return [one for machine, before in BEFORE.items() for one in _machine(folder / machine, machine, list(before))]


def _machine(folder: Path, machine: str, before: Sequence[int]) -> Iterator[Judged]:
    found = read_folder(folder / "calibration")
    profile = find_profile("nvidia-h200")
    steps: list[tuple[PricedStep, float]] = []
    for run_folder in RUNS:
        for row in select(records.read(folder / run_folder).rows, StepRow):
            plan = plan_of(row)
            if row["status"] != "ok" or plan.module or row["value"] is None:  # models alone, for haste
                continue
            run = Run(**plan.settings)
            step = PricedStep(stream_of(plan, run, profile), run, profile)
            if step.bound == "host":
                steps.append((step, row["value"]))
    for count in COUNTS:
        hosts = [_host(folder, found, chosen) for chosen in combinations(before, count)]
        intervals = [(step.on_host(host).interval, seconds) for host in hosts for step, seconds in steps]
        yield Judged(
            machine, count, len(hosts), sum(one.low <= seconds <= one.high for one, seconds in intervals),
            len(intervals), mean((one.high - one.low) / one.value for one, _ in intervals),
        )  # fmt: skip


def _host(folder: Path, found: Found, chosen: Sequence[int]) -> HostCosts:
    """The host that the calibration would have given, had only the chosen processes run."""
    rows = [
        row for row in found.rows
        if not row["key"].startswith("host/") or without_process(row["key"])[1] in chosen
    ]  # fmt: skip
    return fit_host_folder(folder / "calibration", replace(found, rows=rows))
