"""The curves of a ladder by mode: what is at hand is drawn, and every mode has its leaders."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.roofline.cli.choose.cost import write_cost
from flopcast.roofline.dollars import modes
from flopcast.roofline.dollars.curves import cost_curves
from flopcast.roofline.dollars.modes import curves_by_mode, leader_rows, leaders
from flopcast.roofline.dollars.points import CostCurve
from flopcast.roofline.gpu.catalogue.prices import latest, load_prices
from flopcast.roofline.gpu.library.profiles import find_profiles
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.model.models import Config, ladder
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.figures.modes import modes_figure
from flopcast.roofline.views.page.dollars import mode_table
from flopcast.roofline.views.terminal.cost import print_modes

GPUS = ("nvidia-h100-sxm", "nvidia-h200")
MODELS = ladder((256, 512, 1024))
BOOK = load_prices()
PRICES = {gpu: price for gpu in GPUS if (price := latest(BOOK, gpu)) is not None}


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    return find_profiles(GPUS)


@pytest.fixture(scope="module")
def eager(profiles: list[Profile]) -> list[CostCurve]:
    return cost_curves(profiles, MODELS, Run(), PRICES)


def test_only_what_was_compiled_is_drawn(
    eager: Sequence[CostCurve], profiles: list[Profile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is
    found = curves_by_mode(profiles, MODELS, Run(), PRICES, known={"eager": eager}, at_hand=True)
    assert dict(found) == {"eager": eager}
    assert modes_figure(found) is mode_table(found) is None

    def compiled(profiles: Any, models: Sequence[Config], run: Run, prices: Any, **how: Any) -> list[CostCurve]:
        assert [model["hidden_size"] for model in models] == [256, 1024]
        return [replace(curve, points=curve.points[::2]) for curve in eager]

    monkeypatch.setattr(modes, "has_code", lambda config, traced: config["hidden_size"] != 512)
    monkeypatch.setattr(modes, "cost_curves", compiled)
    found = curves_by_mode(profiles, MODELS, Run(), PRICES, known={"eager": eager}, at_hand=True)
    assert [len(curves[0].points) for curves in found.values()] == [3, 2, 2]


def test_every_mode_has_its_leaders(
    eager: Sequence[CostCurve], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_mode = {"eager": eager, "compile": [curve.at_price(PRICES[GPUS[0]]) for curve in eager]}
    assert [one.mode for one in leaders(by_mode)] == ["eager"] * 3 + ["compile"] * 3
    assert {row["gpu"] for row in leader_rows(by_mode)[3:]} == {"nvidia-h200"}  # at one price the faster one
    figure = modes_figure(by_mode)
    assert figure is not None
    assert "eager: " in figure.alt
    assert "compile: h200 from 42M." in figure.alt
    table = mode_table(by_mode)
    assert table is not None
    assert len(table.rows) == 3
    paths = write_cost(eager, tmp_path, by_mode=by_mode)
    assert {"modes.csv", "modes.png", "cost.png"} <= {path.name for path in paths}
    with open(tmp_path / "modes.csv") as file:
        assert [row["mode"] for row in csv.DictReader(file)] == [one.mode for one in leaders(by_mode)]
    print_modes(by_mode)
    assert "Who leads, by mode" in capsys.readouterr().out
