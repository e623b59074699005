"""Accuracy is bounded: forecasts of all committed steps and held-out kernels are as near, and as sure, as they were.

`bounds.toml` has the bounds, which `python -m studies.evidence.bounds` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from studies.evidence.bounds import all_figures, broken, broken_kernels, read_bounds

BOUNDS = read_bounds(Path(__file__).with_name("bounds.toml"))
STEPS = [name for name in BOUNDS if name != "kernels"]

Figures = Mapping[str, Mapping[str, list[float]]]


@pytest.fixture(scope="module")
def found(root: Path) -> tuple[Figures, Mapping[str, list[float]]]:
    return all_figures(root / "reports")


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_forecast_as_well_as_they_were(found: tuple[Figures, Any], name: str) -> None:
    """Device time, all and by class, memory, the step, and how many of its intervals hold, and how wide they are."""
    assert broken(found[0][name], BOUNDS[name]) == []


def test_every_set_of_steps_is_bounded(found: tuple[Figures, Any]) -> None:
    assert found[0].keys() == set(STEPS)


def test_held_out_kernels_are_known_as_well_as_they_were(found: tuple[Any, Mapping[str, list[float]]]) -> None:
    assert broken_kernels(found[1], BOUNDS["kernels"]) == []


def test_a_worse_figure_is_told() -> None:
    bounds: dict[str, list[float]] = {"steps": [3], "device": [1.0, 2.0], "inside": [2], "width": [10.0]}
    assert broken(bounds, bounds) == []
    assert broken({**bounds, "device": [0.9, 2.1]}, bounds) == ["device: 2.10%, at most 2.0% is allowed"]
    assert broken({**bounds, "inside": [1], "width": [11.0]}, bounds) == [
        "inside: 1 intervals hold, at least 2 did",
        "width: 11.00%, at most 10.0% is allowed",
    ]
    assert broken({"steps": [2]}, {"steps": [3]}) == ["steps: 2, 3 bounded"]
    assert broken({}, {"device": [1.0]}) == ["device: bounded or found, not both"]
