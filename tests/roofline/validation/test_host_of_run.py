"""How uncertain the host of a run is: as its own tiny models say, each time told by the times before and after."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log, sqrt
from pathlib import Path
from statistics import fmean
from typing import cast

import numpy as np
import pytest

from flopcast.microbench.records.records import read
from flopcast.microbench.records.rows import Row
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.step.uncertainty import spreads
from flopcast.roofline.validation.host_of_run import NEAR, RESTLESS, RunHost, hosts_of_runs

COSTS = HostCosts(
    name="a host", forward={"launch": 1e-5}, backward={}, optimizer={}, step_fixed=1e-4, sigma=0.3, basis="measured"
)


def run(visits: list[float]) -> RunHost:
    """Each time that the tiny models ran is written twice."""
    return RunHost(COSTS, tuple(pace for visit in visits for pace in [visit] * NEAR))


def test_a_restless_host_is_as_uncertain_as_it_was() -> None:
    """A step between two times is off by its own deviation and by theirs: 1.22 times that of one."""
    noise = np.random.default_rng(1).normal(0.0, 0.1, 400)
    found = run([exp(each) for each in noise])
    assert found.sigma == pytest.approx(0.1 * sqrt(1.5), rel=0.1)
    held = [
        abs(log(found.pace[i]) - fmean([log(found.pace[i - 1]), log(found.pace[i + NEAR])])) < 1.645 * found.sigma
        for i in range(NEAR, len(found.pace) - NEAR, NEAR)
    ]
    assert fmean(held) == pytest.approx(0.9, abs=0.03)


def test_what_is_noise_of_a_sample_is_no_doubt_of_a_step() -> None:
    restless = run([1.0, 1.3, 0.8, 1.2, 1.4, 0.9, 1.1, 1.0, 0.8, 1.3])
    less = replace(restless, noise=0.1)
    assert less.sigma**2 == pytest.approx(restless.sigma**2 - 0.1**2)
    assert replace(restless, noise=1.0).sigma == 0.0


def test_a_steady_drift_is_no_doubt() -> None:
    assert run([exp(0.02 * i) for i in range(30)]).sigma == pytest.approx(0.0, abs=1e-9)


def test_of_few_times_nothing_is_told() -> None:
    assert run([0.7, 1.4, 0.7, 1.4]).sigma == RESTLESS


def test_a_step_gets_the_pace_beside_it_and_the_runs_deviation() -> None:
    visits = [1.0, 1.3, 0.8, 1.2, 1.4, 0.9, 1.1, 1.0, 0.8, 1.3]
    found = run(visits)
    beside = found.at(3 * NEAR)  # between the third time and the fourth
    assert beside.step_fixed == pytest.approx(1e-4 * (0.8 + 1.2) / 2)
    assert beside.sigma == pytest.approx(hypot(spreads().host_same_run, found.sigma))
    assert found.sigma > 0.2
    assert found.at(None) is COSTS


def test_a_pace_between_the_rounds_of_a_step_counts_more_than_those_before_and_after_it() -> None:
    found = replace(run([1.0, 1.3, 0.8, 1.2]), usual=0.040)
    assert found.at(3 * NEAR, [0.060, 0.064, 0.070]).step_fixed == pytest.approx(1.6e-4)
    assert found.at(3 * NEAR, []).step_fixed == found.at(3 * NEAR).step_fixed == pytest.approx(1e-4)


def test_compiled_tiny_models_count_as_if_the_host_had_run_at_its_usual_pace(root: Path) -> None:
    """Of a run each round of the compiled ones is made twice as long, and so is the eager one beside it."""
    rows = [row for row in read(root / "reports/nvidia-h200/random/run9").rows if row["key"].startswith("host/")]
    *_, usual = (row["value"] for row in rows if row["key"] == "host/qwen3-adamw/depth6/steady")
    assert usual
    slowed = [
        {**row, "samples": [2 * each for each in row["samples"]], "host_pace": [2 * usual] * 3}
        if row["key"].startswith("host/qwen3-adamw-compile/") else row
        for row in rows
    ]  # fmt: skip
    profile = find_profile("nvidia-h200")
    (before,), (after,) = (hosts_of_runs(cast(list[Row], each), profile).values() for each in (rows, slowed))
    assert before.usual == after.usual == usual
    for mode, costs in before.costs.compiled.items():
        assert after.costs.compiled[mode].launch == pytest.approx(costs.launch, rel=1e-6)


def test_a_run_killed_before_its_eager_models_were_written_keeps_what_its_compiled_ones_told(root: Path) -> None:
    rows = read(root / "reports/nvidia-h200/random/run7").rows
    assert not any(row["key"].startswith("host/qwen3-adamw/") for row in rows)
    hosts = hosts_of_runs(rows, find_profile("nvidia-h200"))
    assert len(hosts) == 2
    for host in hosts.values():
        assert 15e-6 < host.costs.compiled["compile"].launch < 45e-6
