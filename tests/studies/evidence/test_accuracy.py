"""Accuracy is bounded: forecasts of all committed steps and held-out kernels are as near, and as sure, as they were.

`bounds.toml` has the bounds, which `python -m studies.evidence.bounds` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records import records
from flopcast.microbench.records.rows import StepEstimateRow, StepRow, select
from flopcast.roofline.gpu.fit.cards import run_folders
from flopcast.roofline.validation.compare_steps import plan_of
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.validation.step_plans import factories
from studies.evidence.accuracy import BENCHMARK, BLOCK, FILES, TABLES, Evidence, is_of
from studies.evidence.bounds import broken, broken_kernels, held_out_figures, in_suite, read_bounds, step_figures
from studies.evidence.steps import MACHINES, compared

BOUNDS = read_bounds(Path(__file__).with_name("bounds.toml"))
STEPS = [name for name in BOUNDS if name != "kernels"]
OF_PLAIN_STEPS = ("steps", "h100")  # tables of steps that are all forecast here

Rows = dict[str, list[StepComparison]]
Figures = dict[str, dict[str, list[float]]]


@pytest.fixture(scope="module")
def rows(root: Path) -> Rows:
    """The committed steps of every machine beside their forecasts."""
    return compared(root / "reports", in_suite, with_projected=False)


@pytest.fixture(scope="module")
def found(rows: Rows) -> Figures:
    return step_figures(rows)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_forecast_as_well_as_they_were(found: Figures, name: str) -> None:
    """Device time, all and by class, memory, the step, and how many of its intervals hold, and how wide they are."""
    assert broken(found[name], BOUNDS[name]) == []


def test_every_module_of_the_committed_steps_is_forecast(root: Path) -> None:
    """Without a forecast a step counts as outside its interval: five of a TransformerEncoder did."""
    plans = [
        plan_of(cast(StepRow, row))
        for folder in MACHINES.values()
        for run in list(run_folders(root / "reports" / folder).values()) or [root / "reports" / folder]
        for row in records.read(run).rows
        if row["key"].startswith("step/")
    ]
    assert {plan.module for plan in plans if plan.module} <= factories()
    assert len(plans) > 200


def test_every_set_of_steps_is_bounded(found: Figures) -> None:
    assert found.keys() == set(STEPS)


def test_held_out_kernels_are_known_as_well_as_they_were(root: Path) -> None:
    assert broken_kernels(held_out_figures(root / "reports"), BOUNDS["kernels"]) == []


def test_tables_shown_are_todays(rows: Rows, root: Path) -> None:
    """`python -m studies.evidence.accuracy` makes them anew."""
    evidence = Evidence(root / "reports")
    vars(evidence)["every"] = rows
    shown = {
        block[2]: block[0].removeprefix(block[1]).removesuffix(block[3]).strip()
        for path in FILES
        for block in BLOCK.finditer((root / path).read_text(encoding="utf-8"))
    }
    assert shown.keys() == set(TABLES)
    for name in OF_PLAIN_STEPS:
        assert shown[name] == TABLES[name](evidence), name


def test_a_worse_figure_is_told() -> None:
    bounds: dict[str, list[float]] = {"steps": [3], "device": [1.0, 2.0], "inside": [2], "width": [10.0]}
    assert broken(bounds, bounds) == []
    assert broken({**bounds, "device": [0.9, 2.1]}, bounds) == ["device: 2.10%, at most 2.0% is allowed"]
    assert broken({**bounds, "inside": [1], "width": [11.0]}, bounds) == [
        "inside: 1 intervals hold, at least 2 did",
        "width: 11.00%, at most 10.0% is allowed",
    ]
    assert broken({"steps": [2]}, {"steps": [3]}) == ["steps: [2] in this set, [3] bounded"]
    assert broken({}, {"device": [1.0]}) == ["device: bounded or found, not both"]


def test_records_from_before_plans_had_an_option_are_found_again() -> None:
    """torch's estimates name the options of their day; the plans of steps have more since."""
    rows = select(records.read(Path(__file__).parents[3] / "reports" / BENCHMARK).rows, StepEstimateRow)
    plan = StepPlan(**rows[0]["plan"])
    assert is_of(rows[0]["plan"], plan)
    assert not is_of(rows[1]["plan"], plan)
    assert len(vars(plan)) > len(rows[0]["plan"])
