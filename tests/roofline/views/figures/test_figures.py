"""The figures: what each is drawn from, and that it is left out where there is nothing to draw."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flopcast.errors import UsageError
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.base.units import byte_size, count, duration, rate
from flopcast.roofline.dollars.points import CostCurve, StepPoint, cost_curve
from flopcast.roofline.gpu.catalogue.prices import latest, load_prices
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from flopcast.roofline.views.figures.agreement import agreement_figure, residual_figure
from flopcast.roofline.views.figures.anatomy import anatomy_figure, batch_figure
from flopcast.roofline.views.figures.bandwidth import memory_figure
from flopcast.roofline.views.figures.canvas import Figure, apart, finish, halo, new_sheet, spread_apart, styled
from flopcast.roofline.views.figures.capacity import capacity_figure, host_figure
from flopcast.roofline.views.figures.colours import CARD, DARK, DARK_COLOURS
from flopcast.roofline.views.figures.cost import cost_figure
from flopcast.roofline.views.figures.efficiency_map import map_figure, product_map
from flopcast.roofline.views.figures.file import save
from flopcast.roofline.views.figures.kernels import both_figures, roofline_figure
from flopcast.roofline.views.page.page import TEMPLATES


@pytest.fixture(scope="module")
def profile() -> Profile:
    values = {"matrix_burst/bf16": 7.9e14, "hbm_copy": 4e12, "kernel_floor": 1.1e-6}
    peak = Number(9.9e14, 9.9e14, 9.9e14, "datasheet")
    return Profile(
        gpu="nvidia-h200", basis="measured", device={"type": "cuda", "name": "NVIDIA H200"}, peaks={"bf16": peak},
        ceilings={name: Number(value, value, value, "measured") for name, value in values.items()}, surfaces={},
    )  # fmt: skip


def curve(gpu: str, rates: list[float], basis: str = "measured") -> CostCurve:
    """FLOP/s at 1e8, 2e8 ... parameters, each plus or minus 5%."""
    points = [
        StepPoint(n_params=(i + 1) * 10**8, width=256, depth=4, step_seconds=1e15 / rate, low=0.95e15 / rate,
                  high=1.05e15 / rate, flops_counted=1e15, tokens=1024)
        for i, rate in enumerate(rates)
    ]  # fmt: skip
    price = latest(load_prices(), gpu)
    assert price is not None
    return cost_curve(gpu, points, price, basis)


def step(name: str, error: float) -> StepComparison:
    """A real step whose every component is off by `error`."""
    off = Part(measured=0.02, forecast=0.02 * (1 + error))
    return StepComparison(
        StepPlan(name=name, config={}), "ok", step=replace(off, low=0.019, high=0.03), device=off, host=off, peak=off,
        classes=dict.fromkeys(GROUPS, off), bound="memory",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"), [(613182976, "613M"), (2031679232, "2.03B"), (999_999_999, "1B"), (4_096, "4.1k")]
)
def test_counts_are_short(value: int, text: str) -> None:
    assert count(value) == text


def test_units_follow_the_size() -> None:
    assert rate(7.903e14, "FLOP/s") == "790 TFLOP/s"
    assert rate(2.5e10, "B/s") == "25 GB/s"
    assert duration(1.11e-6) == "1.11 µs"
    assert duration(0.0335) == "33.5 ms"
    assert [duration(s) for s in (0.9996e-3, 0.9996, 33.5, 5000.0)] == ["1 ms", "1 s", "33.5 s", "5,000 s"]
    assert [byte_size(n) for n in (4, 999.6e6, 2.5e9, 3.71e13, 2e15)] == ["4 B", "1 GB", "2.5 GB", "37.1 TB", "2 PB"]


def test_nothing_to_draw_gives_no_figure(profile: Profile) -> None:
    assert memory_figure(profile) is None
    assert both_figures(replace(profile, ceilings={})) is None
    assert anatomy_figure([]) is None
    assert batch_figure([], "a model", 256) is None
    assert capacity_figure([], [], 1e9, "a model", 256) is None
    assert host_figure([]) is None
    assert map_figure(profile, product_map(profile)) is None
    assert agreement_figure([]) is None
    assert residual_figure([]) is None
    assert cost_figure([]) is None


def test_roofs_are_drawn_without_points(profile: Profile) -> None:
    figure = roofline_figure(profile)
    assert figure is not None
    assert "0 measured" in figure.alt
    assert "datasheet" in figure.basis


def test_a_figure_file_stands_alone_and_takes_the_dark(profile: Profile) -> None:
    light, dark = roofline_figure(profile), roofline_figure(profile, theme=DARK)
    assert light is not None
    assert dark is not None
    assert f"var(--f-{CARD[1:]})" in light.svg
    assert "var(" not in light.svg_file
    assert light.svg_file.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert CARD in light.svg_file
    assert CARD not in dark.svg_file
    assert DARK_COLOURS[CARD] in dark.svg_file
    assert light.png != dark.png


def test_the_page_knows_every_colour_of_the_dark() -> None:
    css = (TEMPLATES / "report.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    for ground, wanted in ((light, {c: c for c in DARK_COLOURS}), (dark, DARK_COLOURS)):
        said = dict(re.findall(r"--f-([0-9a-f]{6}): (#[0-9a-f]{6})", ground))
        assert said == {name[1:]: colour for name, colour in wanted.items()}


def test_labels_are_pushed_apart_and_no_farther() -> None:
    assert spread_apart([0.0, 50.0, 100.0], 10.0) == [0.0, 50.0, 100.0]
    assert spread_apart([50.0, 52.0], 10.0) == [46.0, 56.0]
    placed = spread_apart([0.0, 1.0, 2.0, 3.0, 30.0, 31.0], 10.0)
    assert placed == sorted(placed)
    assert min(b - a for a, b in pairwise(placed)) >= 10.0 - 1e-9


def test_an_error_off_the_scale_is_counted_and_not_lost() -> None:
    rows = [step(f"w{i}", 0.01 * i) for i in range(20)] + [step("far", 3000.0)]
    figure = residual_figure(rows)
    assert figure is not None
    assert f"{4 + len(GROUPS)} errors beyond" in figure.caption
    assert "+300000.0%" in figure.svg


def test_a_step_that_did_not_run_is_no_point() -> None:
    rows = [step("ran", 0.1), StepComparison(StepPlan(name="oom", config={}), "oom", step=Part(forecast=0.02))]
    figure = agreement_figure(rows)
    assert figure is not None
    assert "oom" not in figure.svg
    assert "1 real steps" in figure.caption


def test_a_crossover_is_marked_and_named() -> None:
    figure = cost_figure(
        [curve("nvidia-h200", [1e14, 2e14, 8e14]), curve("nvidia-l4", [3e13, 3e13, 3e13], "projected")]
    )
    assert figure is not None
    assert "nvidia-l4 gives more below" in figure.svg
    assert figure.basis == "nvidia-h200 measured; nvidia-l4 projected"


def test_the_cost_figure_is_saved_alone(tmp_path: Path) -> None:
    target = tmp_path / "new" / "cost.png"
    assert cost_figure([]) is None
    figure = cost_figure([curve("nvidia-h200", [1e14, 2e14])])
    assert figure is not None
    save(figure, target)
    assert target.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="--out"):
        save(figure, target / "below-a-file.png")


def test_marks_get_their_own_words_and_ids_a_prefix() -> None:
    sheet = new_sheet(2.0)
    sheet.scatter(sheet.axes[0], [1, 2, 3], [1, 2, 3], ["x, a < b", "x, c", "x, d|e"])
    figure = finish(sheet, "mine", "Title", "caption", 'alt "text"', "measured")
    assert figure.svg.startswith("<svg")
    assert 'data-head="x, " data-tips="a &lt; b|c|d/e"' in figure.svg
    assert 'aria-label="alt &quot;text&quot;"' in figure.svg
    assert 'id="mine-' in figure.svg
    assert "xmlns" not in figure.svg
    assert CARD.startswith("#")


def test_points_on_one_place_are_drawn_once_and_all_told() -> None:
    sheet = new_sheet(2.0)
    xs = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, *(0.01 * i for i in range(20, 60))]
    words = [f"point {i}" for i in range(len(xs))]
    sheet.scatter(sheet.axes[0], xs, xs, words, color=CARD)
    figure = finish(sheet, "mine", "Title", "caption", "alt", "measured")
    assert "point 1; point 2; point 3; and 2 more here" in figure.svg
    marks = re.search(r'data-tips="([^"]*)".*', figure.svg)
    assert marks is not None
    assert len(marks[1].split("|")) == len(set(xs))
    assert figure.svg.count('href="#mine-') >= len(set(xs))


def test_marks_of_one_clip_are_clipped_once_whatever_their_shape() -> None:
    sheet = new_sheet(2.0)
    for marker in "o^":  # matplotlib writes circles as <use>, triangles as paths of their own
        xs = [float(i) for i in range(20)] * 2
        sheet.scatter(sheet.axes[0], xs, xs, [str(i) for i in range(40)], marker=marker)
    figure = finish(sheet, "mine", "Title", "caption", "alt", "measured")
    assert figure.svg.count("data-tips=") == 2
    for tips in re.findall(r'data-tips="([^"]*)"', figure.svg):
        assert tips.split("|")[:2] == ["0; 20", "1; 21"]
    assert figure.svg.count("clip-path=") == 2


@styled
def _labelled() -> Figure:
    sheet = new_sheet(2.0)
    sheet.axes[0].text(0.5, 0.5, "legible words", path_effects=halo())
    return finish(sheet, "mine", "Title", "caption", "alt", "measured")


def test_outlined_letters_stay_letters() -> None:
    figure = _labelled()
    assert figure is not None
    assert re.search(r'<g style="paint-order: stroke; stroke: var\([^"]*"><text [^>]*>legible words</text>', figure.svg)
    assert "paint-order: stroke; stroke: #" in figure.svg_file


def test_bars_over_time_have_words() -> None:
    sheet = new_sheet(2.0)
    sheet.bars(sheet.axes[0], [(0.0, 1.0), (2.0, 1.0), (4.0, 3.0)], (0.0, 1.0), ["first", "second", "third"])
    assert 'data-tips="first|second|third"' in finish(sheet, "mine", "Title", "caption", "alt", "measured").svg


def test_a_file_of_its_own_needs_no_page(profile: Profile) -> None:
    figure = roofline_figure(profile)
    assert figure is not None
    root = ElementTree.fromstring(figure.svg_file)
    assert root.get("role") == "img"
    assert len(root.get("aria-label") or "") > 40
    ids = {element.get("id") for element in root.iter()}
    wanted = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', figure.svg_file)
    assert wanted
    assert all((one or other) in ids for one, other in wanted)


def test_the_map_shows_another_wave_of_tiles() -> None:
    """The shipped H200: just past a full wave of tiles, a product takes longer than its FLOPs ask for."""
    found = product_map(find_profile("nvidia-h200"), sizes=tuple(range(1024, 2561, 64)))
    assert found is not None
    assert found.seconds.shape == (25, 25)
    assert found.waves is not None
    assert found.flops_per_second.max() > 6e14
    diagonal = found.flops_per_second.diagonal()
    assert any(b < 0.95 * a for a, b in pairwise(diagonal))  # rates fall behind an edge, though sizes grow
    figure = map_figure(find_profile("nvidia-h200"), found)
    assert figure is not None
    assert 'data-columns="25"' in figure.svg
    assert figure.svg.count("waves|") == 624


def test_a_larger_batch_costs_less_a_token_and_more_memory() -> None:
    profile = find_profile("nvidia-h200")
    found = [
        PricedStep(get_stream(config, traced_of(run, profile), vary="batch"), run, profile).forecast()
        for config in [load_config("qwen3-0.6b")]
        for run in [Run(batch=2), Run(batch=64)]
    ]
    figure = batch_figure(found, "qwen3-0.6b", 256)
    assert figure is not None
    assert "at batch 2," in figure.caption
    assert "at 64." in figure.caption
    room = capacity_figure(found, found, 20e9, "qwen3-0.6b", 256)
    assert room is not None
    assert "batch 64, weights: 2.38 GB" in room.svg


def test_points_under_one_another_are_drawn_once() -> None:
    """A mark is 0.04 decades wide: what lies within half of that of a drawn one adds nothing but size."""
    xs = [1.0, 1.001, 10.0, 10.0, 10.0]
    ys = [1.0, 1.001, 5.0, 5.0, 7.0]
    assert apart(xs, ys) == [0, 2, 4]
    assert apart([], []) == []
