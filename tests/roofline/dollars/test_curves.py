"""Forecasts of a ladder become curves of FLOPs per dollar, and files."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.cli.choose.cost import write_cost
from flopcast.roofline.dollars.crossovers import best_gpu
from flopcast.roofline.dollars.curves import OWN, SAME, cost_curves
from flopcast.roofline.dollars.points import HOST_FACTORS, CostCurve
from flopcast.roofline.gpu.catalogue.prices import parse_override
from flopcast.roofline.gpu.library.profiles import find_profiles
from flopcast.roofline.gpu.profile.host import NO_HOST
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import HOST, forecast
from flopcast.roofline.stream.model.models import ladder
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.figures.cost import cost_figure

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
        ("nvidia-h200", "measured", 4.0),
        ("nvidia-l4", "projected", 0.5),
    ]
    assert [[(p.step.width, p.step.depth) for p in c.points] for c in curves] == [[(256, 4), (512, 4)]] * 2


def test_a_point_is_the_forecast_of_its_model(curves: list[CostCurve], profiles: list[Profile]) -> None:
    for profile, curve in zip(profiles, curves, strict=True):
        found, point = forecast(MODELS[1], Run(), profile), curve.points[1]
        step = point.step
        assert (step.n_params, step.tokens, step.fits) == (found.n_params, 4 * 256, found.fits)
        assert (step.step_seconds, step.low, step.high) == (
            found.step_seconds,
            found.step_seconds_low,
            found.step_seconds_high,
        )
        assert (step.bound, step.needed_bytes) == (found.bound, found.needed_bytes)
        assert point.usd_per_step == pytest.approx(curve.price.usd_per_hour / 3600 * found.step_seconds)


def test_one_host_for_both_cancels_where_it_bounds_both(profiles: list[Profile]) -> None:
    """Width 256 on an H200 and an H100 waits for the host on both: with one host the ratio of their speeds is known."""
    both = [profiles[0], find_profiles(["nvidia-h100-sxm"])[0]]
    prices = {p.gpu: parse_override(f"{p.gpu}=1") for p in both}
    ratios = {}
    for hosts in (OWN, SAME):
        a, b = (c.points[0] for c in cost_curves(both, MODELS[:1], Run(), prices, hosts=hosts))
        assert (a.step.bound, b.step.bound) == ("host", "host")
        ratios[hosts] = a.flops_per_usd.over(b.flops_per_usd)
    assert ratios[OWN].value == pytest.approx(ratios[SAME].value)
    width = {hosts: ratio.high / ratio.low for hosts, ratio in ratios.items()}
    assert width[OWN] > 1.5
    assert width[SAME] < 1.1


def test_a_host_given_by_name_is_one_host(profiles: list[Profile]) -> None:
    given = replace(profiles[0].host or NO_HOST, name="mine")
    for curve in cost_curves(profiles, MODELS[:1], Run(), PRICES, host=given):
        assert HOST in curve.points[0].step.shared


def test_hosts_that_are_not_one_are_not_said_to_be(profiles: list[Profile]) -> None:
    other = replace(profiles[1], host=replace(profiles[1].host or NO_HOST, name="elsewhere"))
    with pytest.raises(UsageError, match=r"several hosts \(elsewhere, .*--host"):
        cost_curves([profiles[0], other], MODELS[:1], Run(), PRICES, hosts=SAME)
    with pytest.raises(UsageError, match="valid are own, same"):
        cost_curves(profiles, MODELS[:1], Run(), PRICES, hosts="both")


def test_what_if_forecasts_other_hosts(profiles: list[Profile]) -> None:
    """Half the host's cost is what a forecast with that host says, and none what `--host none` says."""
    h200 = profiles[0]
    (curve,) = cost_curves(profiles[:1], MODELS[:1], Run(), PRICES, what_if=True)
    own = h200.host or NO_HOST
    for factor in HOST_FACTORS:
        host = replace(own.scaled(factor), sigma=own.sigma if factor else 0.0)
        found = forecast(MODELS[0], Run(), h200, host=host)
        point = curve.with_host(factor).points[0]
        assert point.step.step_seconds == pytest.approx(found.step_seconds)
    assert curve.with_host(0.0).points[0].flops_per_usd.value > curve.points[0].flops_per_usd.value


def test_progress_counts_models_times_gpus(profiles: list[Profile]) -> None:
    seen: list[tuple[int, int]] = []
    cost_curves(profiles, MODELS[:1], Run(), PRICES, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_another_host_feeds_all_of_them(profiles: list[Profile], curves: list[CostCurve]) -> None:
    alone = cost_curves(profiles, MODELS[:1], Run(), PRICES, host=NO_HOST)
    for without, with_host in zip(alone, curves, strict=True):
        assert without.points[0].step.step_seconds <= with_host.points[0].step.step_seconds


def test_a_gpu_without_a_price_has_times_and_no_dollars(profiles: list[Profile]) -> None:
    (curve,) = cost_curves(profiles[:1], MODELS[:1], Run(), {})
    assert (curve.price, curve.unranked) == (None, "no price")
    (point,) = curve.points
    assert point.tokens_per_second.value > 0
    assert curve.flops_per_usd_at(point.step.n_params) is None
    with pytest.raises(ValueError, match="no price of nvidia-"):
        _ = point.usd_per_step
    assert best_gpu([curve], point.step.n_params) is None
    assert cost_figure([curve]) is None


def test_tables_and_figure_are_written(curves: list[CostCurve], tmp_path: Path) -> None:
    paths = write_cost(curves, tmp_path / "new")
    assert [path.name for path in paths] == [
        "cost.csv", "crossovers.csv", "break_even.csv", "best.csv", "memory.csv", "cost.png"
    ]  # fmt: skip
    with paths[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["gpu"], row["width"], row["fits"]) for row in rows] == [
        (gpu, width, "true") for gpu in GPUS for width in ("256", "512")
    ]
    with paths[1].open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["sentence"]
    assert paths[-1].stat().st_size > 1000


def test_one_gpu_alone_has_no_crossovers_and_is_written_all_the_same(curves: list[CostCurve], tmp_path: Path) -> None:
    for path in write_cost(curves[:1], tmp_path):
        assert path.is_file()


def test_a_folder_that_cannot_be_written_is_named(curves: list[CostCurve], tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(UsageError, match=r"plain/new.*cannot be written.*--out"):
        write_cost(curves, tmp_path / "plain" / "new")
