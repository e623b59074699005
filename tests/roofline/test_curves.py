"""Forecasts of a ladder become curves of FLOPs per dollar, and files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.cost import CostCurve
from flopcast.roofline.curves import cost_curves, step_point, write_cost
from flopcast.roofline.forecast import NO_HOST, Run, forecast
from flopcast.roofline.lookup import find_profiles
from flopcast.roofline.models import ladder
from flopcast.roofline.prices import parse_override
from flopcast.roofline.profile import Profile

GPUS = ("nvidia-h200", "nvidia-l4")
MODELS = ladder((256, 512))
PRICES = {gpu: parse_override(f"{gpu}={usd}") for gpu, usd in zip(GPUS, (4.0, 0.5), strict=True)}


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    return find_profiles(GPUS)


@pytest.fixture(scope="module")
def curves(profiles: list[Profile]) -> list[CostCurve]:
    return cost_curves(profiles, MODELS, Run(), PRICES)


def test_a_curve_a_gpu_with_its_price_and_basis(curves: list[CostCurve]) -> None:
    assert [(c.gpu, c.basis, c.price.usd_per_hour) for c in curves] == [
        ("nvidia-h200", "measured", 4.0), ("nvidia-l4", "projected", 0.5)
    ]  # fmt: skip
    assert [[(p.step.width, p.step.depth) for p in c.points] for c in curves] == [[(256, 4), (512, 4)]] * 2


def test_a_point_is_the_forecast_of_its_model(curves: list[CostCurve], profiles: list[Profile]) -> None:
    found = forecast(MODELS[1], Run(), profiles[0])
    point = curves[0].points[1]
    assert point.step == step_point(found, MODELS[1], Run())
    assert (point.step.n_params, point.step.tokens) == (found.n_params, 4 * 256)
    assert (point.step.low, point.step.high) == (found.step_seconds_low, found.step_seconds_high)
    assert point.usd_per_step == pytest.approx(4.0 / 3600 * found.step_seconds)


def test_progress_counts_models_times_gpus(profiles: list[Profile]) -> None:
    seen: list[tuple[int, int]] = []
    cost_curves(profiles, MODELS[:1], Run(), PRICES, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_another_host_feeds_all_of_them(profiles: list[Profile], curves: list[CostCurve]) -> None:
    alone = cost_curves(profiles, MODELS[:1], Run(), PRICES, host=NO_HOST)
    for without, with_host in zip(alone, curves, strict=True):
        assert without.points[0].step.step_seconds <= with_host.points[0].step.step_seconds


def test_a_gpu_without_a_price_is_a_fault_of_the_caller(profiles: list[Profile]) -> None:
    with pytest.raises(KeyError):
        cost_curves(profiles[:1], MODELS[:1], Run(), {})


def test_tables_and_figure_are_written(curves: list[CostCurve], tmp_path: Path) -> None:
    paths = write_cost(curves, tmp_path / "new")
    assert [path.name for path in paths] == ["cost.csv", "crossovers.csv", "cost.png"]
    with paths[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["gpu"], row["width"], row["fits"]) for row in rows] == [
        (gpu, width, "true") for gpu in GPUS for width in ("256", "512")
    ]
    with paths[1].open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["sentence"]
    assert paths[2].stat().st_size > 1000


def test_one_gpu_alone_has_no_crossovers_and_is_written_all_the_same(
    curves: list[CostCurve], tmp_path: Path
) -> None:
    for path in write_cost(curves[:1], tmp_path):
        assert path.is_file()


def test_a_folder_that_cannot_be_written_is_named(curves: list[CostCurve], tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(UsageError, match=r"plain/new.*cannot be written.*--out"):
        write_cost(curves, tmp_path / "plain" / "new")
