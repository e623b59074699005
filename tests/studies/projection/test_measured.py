"""A projection against a card: forecasts made ahead are read as they were written, errors are what the numbers say."""

import csv
from pathlib import Path

import pytest

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu.library.profiles import projection
from flopcast.roofline.stream.lowering import describe
from flopcast.roofline.stream.model.models import make_config
from studies.projection import ahead as projection_ahead
from studies.projection import measured as projection_measured
from studies.projection.measured import AHEAD, TODAY, Measured, by_id, classes, errors, judge
from studies.projection.measured_report import figure, headline, page

FOLDER = Path(__file__).resolve().parents[3] / "reports/projection/nvidia-h100-sxm"
GPU = "nvidia-h100-sxm"


def test_what_is_said_ahead_is_read_as_it_was_written(tmp_path: Path) -> None:
    shape = Gemm(m=1024, n=1024, k=1024, dtype="bf16", layout="nt")
    plan = StepPlan(name="w256-d3", config=make_config(width=256, depth=3))
    profile = projection(GPU)
    rows = list(projection_ahead.forecast_rows(profile, [(shape, "torch", "cold")], [vars(plan)]))
    path = tmp_path / "there" / projection_ahead.FILE
    assert projection_ahead.write(path, rows) == len(rows)
    read = by_id(projection_ahead.read(path))
    assert read.keys() == by_id(rows).keys()
    kernel = read["kernel", shape.key, "torch", "cold"]
    estimate = profile.estimate([(describe.describe(shape, "torch"), "torch", "cold")])[0]
    assert kernel["value"] == pytest.approx(estimate.seconds, rel=1e-6)
    assert kernel["low"] < kernel["value"] < kernel["high"]
    device, step = (read[kind, plan.key, "", ""] for kind in ("device", "step"))
    parts = sum(row["value"] for (kind, *_), row in read.items() if kind.startswith("device/"))
    assert parts == pytest.approx(device["value"], rel=1e-6)
    assert step["low"] < step["value"] < step["high"]
    before = path.read_bytes()
    projection_ahead.write(path, rows)
    assert path.read_bytes() == before


def _judged() -> list[projection_measured.Row]:
    measured = [Measured("kernel", "gemm", f"k{i}", "torch", "cold", 1.0) for i in range(5)]
    measured += [Measured("device", "ladder", "s", "", "", 2.0), Measured("ceiling", "", "hbm_copy", "", "", 4e12)]
    said = [
        {"kind": "kernel", "key": f"k{i}", "backend": "torch", "cache": "cold", "value": value, "low": value * 0.9,
         "high": value * 1.1}
        for i, value in enumerate((0.5, 0.95, 1.0, 1.05, 1.2))
    ]  # fmt: skip
    said += [
        {"kind": "device", "key": "s", "backend": "", "cache": "", "value": 1.9, "low": 1.8, "high": 2.1},
        {"kind": "ceiling", "key": "hbm_copy", "value": 3e12, "low": None, "high": None},
    ]
    now = [{**row, "value": row["value"] * 2} for row in said]
    return judge(measured, {AHEAD: by_id(said), TODAY: by_id(now)})


def test_errors_are_signed_counted_and_told_apart_by_stage() -> None:
    rows = _judged()
    assert [row["ahead_error"] for row in rows[:5]] == pytest.approx([-0.5, -0.05, 0.0, 0.05, 0.2])
    assert [row["ahead_within"] for row in rows[:5]] == [False, True, True, True, False]
    found = {(row["stage"], row["kind"], row["group"]): row for row in classes(rows)}
    ahead, later = found[AHEAD, "kernel", "gemm"], found[TODAY, "kernel", "gemm"]
    assert ahead["rows"] == 5
    assert ahead["median_error"] == pytest.approx(0.0)
    assert ahead["median_abs_error"] == pytest.approx(0.05)
    assert ahead["worst_error"] == pytest.approx(-0.5)
    assert ahead["sum_error"] == pytest.approx(4.7 / 5 - 1)
    assert ahead["inside_90"] == pytest.approx(0.6)
    assert later["median_error"] == pytest.approx(1.0)
    assert found[AHEAD, "device", "all"]["median_error"] == pytest.approx(-0.05)
    assert not any(kind == "ceiling" for _, kind, _ in found)
    assert errors([], AHEAD) == {"rows": 0}


def test_what_was_not_said_ahead_is_not_judged() -> None:
    """A kernel that only today's projection knows tests nothing."""
    one = Measured("kernel", "gemm", "new", "torch", "cold", 1.0)
    said = {one.id: {"value": 1.0, "low": 0.9, "high": 1.1}}
    assert judge([one], {AHEAD: {}, TODAY: said}) == []
    assert len(judge([one], {AHEAD: said, TODAY: {}})) == 1


def test_the_page_holds_what_the_rows_say() -> None:
    rows = _judged()
    by_class, ceilings = classes(rows), [row for row in rows if row["kind"] == "ceiling"]
    text = page(GPU, projection(GPU), by_class, ceilings, [], rows)
    assert "| matrix products, cold | 5 | +0.0% | 5.0% |" in text
    assert "| hbm_copy | 4 TB/s | 3 | -25.0% |  | +50.0% |" in text
    assert "1 real steps: device time -5.0% at the median" in text
    drawn = figure(rows, GPU)
    assert drawn is not None
    assert "matrix products, cold +0.0%" in drawn.alt
    assert headline(by_class)[0].startswith("matrix products, cold")


def test_a_gpu_of_which_nothing_was_said_ahead_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing was said ahead.*studies.projection.ahead nvidia-l4"):
        projection_measured.main(["nvidia-l4", "--out", str(tmp_path)])


def test_what_was_said_ahead_is_not_said_again() -> None:
    before = (FOLDER / projection_ahead.FILE).read_bytes()
    with pytest.raises(UsageError, match="stays as it was said"):
        projection_ahead.main([GPU, "--out", str(FOLDER.parent)])
    assert (FOLDER / projection_ahead.FILE).read_bytes() == before


def test_the_committed_page_is_of_the_committed_rows() -> None:
    with (FOLDER / "classes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    whole = next(row for row in rows if (row["stage"], row["kind"], row["group"]) == (AHEAD, "device", "all"))
    page_ = (FOLDER / "README.md").read_text()
    assert f"**{whole['rows']} real steps: device time {float(whole['median_error']):+.1%} at the median" in page_
    assert "nvidia-h200" in page_
