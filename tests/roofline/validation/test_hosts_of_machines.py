"""Forecasts of committed steps with a machine's own calibration, and with the host that ships."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flopcast.microbench.records import records
from flopcast.microbench.records.rows import StepRow, select
from flopcast.roofline.gpu.fit.folder import fit_host_folder
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import HostCosts, default_host
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.validation.compare_steps import plan_of, stream_of

SHARE = 0.85  # of the steps of every machine are to lie inside their 90% interval


def steps(folders: list[Path], host: HostCosts) -> Iterator[tuple[str, bool]]:
    """What bounds each step, and whether its measured time lies in its interval; models alone, for haste."""
    profile = find_profile("nvidia-h200")
    for folder in folders:
        for row in select(records.read(folder).rows, StepRow):
            plan = plan_of(row)
            if row["status"] == "ok" and not plan.module:
                run = Run(**plan.settings)
                step = PricedStep(stream_of(plan, run, profile), run, profile, host)
                yield step.bound, step.interval.low <= (row["value"] or 0.0) <= step.interval.high


@pytest.mark.parametrize("machine", ["1", "2"])
def test_a_machines_own_processes_hold_the_steps_of_its_next_ones(root: Path, machine: str) -> None:
    """One process is one draw: three more processes of each machine, each with its own steps."""
    folder = root / "reports" / "nvidia-h200" / "host-processes" / machine
    host = fit_host_folder(folder / "calibration")
    assert len(host.layers["step"]["processes"]) == (12 if machine == "1" else 5)
    assert host.sigma < 0.75 * default_host().sigma  # what measuring is good for
    found = list(steps([folder / "run1", folder / "run2"], host))
    assert {bound for bound, _ in found} == {"host"}
    assert sum(inside for _, inside in found) >= SHARE * len(found)


def test_the_shipped_host_holds_the_steps_of_the_fastest_machine_that_was_measured(root: Path) -> None:
    """None of its host-bound steps lay inside the interval of the host of the profile's own machine."""
    folder = root / "reports" / "nvidia-h200" / "steps-other-host"
    rows = [row["value"] for row in select(records.read(folder).rows, StepRow) if row["status"] == "ok"]
    found = list(steps([folder], default_host()))
    assert len(found) == len(rows)
    assert sum(inside for _, inside in found) >= SHARE * len(found)
