"""What a person reads: units, gaps where nothing is known, and nothing on the wrong stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.base import units
from flopcast.roofline.gpu.fit.quality import FitReport, Quality
from flopcast.roofline.gpu.library.profiles import Known, find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from flopcast.roofline.views.terminal import console, fit, gpus
from flopcast.roofline.views.terminal import forecast as terminal_forecast
from flopcast.roofline.views.terminal.roofs import print_roofs
from flopcast.roofline.views.terminal.validation import print_validation

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def h200() -> Profile:
    return find_profile("nvidia-h200")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.ms(0.0123456), "12.35"),
        (units.ms(1.5), "1,500.0"),
        (units.ms(2.4321e-6), "0.00243"),
        (units.percent(-0.0123), "-1.2%"),
        (units.percent(0.5), "+50.0%"),
        (units.share(0.256), "25.6%"),
        (units.utilisation(0.0001234), "0.012%"),
        (units.utilisation(0.256), "25.6%"),
        (units.parameters(4_200), "4.2 k"),
        (units.rate(989.4e12, "FLOP/s", 1), "989.4 TFLOP/s"),
        (units.rate(20e9, "FLOP/s", 1), "20.0 GFLOP/s"),
        (units.percent(0.0004), "0.0%"),
        (units.ms_in_column(0.0123456), "12.35"),
        (units.ms_in_column(0.000123456), "0.123"),
        (units.ms_in_column(1.5), "1,500.00"),
        (units.gb_in_column(15e10), "150.0"),
        (units.three_digits(0.0170), "0.017"),
        (units.three_digits(4.5), "4.5"),
        (units.three_digits(5.7689e-5), "0.0000577"),
        (units.three_digits(5.7689e-12), "5.77e-12"),
        (units.three_digits(1440), "1,440"),
        (units.three_in_column(0.0170), "0.0170"),
        (units.three_in_column(131), "131"),
        (units.three_in_column(1440), "1,440"),
        (units.gigabytes(1.5e9), "1.50 GB"),
        (units.gigabytes(15e10), "150.0 GB"),
        (units.parameters(596_049_920), "596.0 M"),
        (units.parameters(8.19e9), "8.19 B"),
        (units.short_name("nvidia-a100-80gb-pcie"), "a100-80gb-pcie"),
    ],
)
def test_units(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize("show", [units.ms, units.percent, units.share, units.gigabytes])
def test_what_is_not_known_is_a_dash(show: Any) -> None:
    assert show(None) == units.NONE


@given(st.floats(1e-9, 1e4), st.floats(1e-9, 1e4))
def test_more_time_never_reads_less(one: float, two: float) -> None:
    a, b = (float(units.ms(seconds).replace(",", "")) for seconds in sorted((one, two)))
    assert a <= b


def test_results_go_to_stdout_and_remarks_to_stderr(capsys: Captured, h200: Profile) -> None:
    bare = replace(h200, surfaces={})  # nothing measured: a forecast that warns
    terminal_forecast.print_forecast(forecast(make_config(width=512, depth=4), Run(), bare), Run())
    out, err = capsys.readouterr()
    assert "step, 90% interval" in out
    assert "warning: " in err
    assert "warning: " not in out


def test_what_does_not_fit_says_so_in_capitals(capsys: Captured, h200: Profile) -> None:
    found = forecast(make_config(width=512, depth=4), Run(), replace(h200, surfaces={}))
    terminal_forecast.print_forecast(replace(found, fits=False), Run())
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_nothing_is_cut_where_there_is_no_terminal(capsys: Captured) -> None:
    assert console.console().width == 120
    source = "/a/very/long/folder" * 12
    gpus.print_known([Known("my-gpu", "measured", source)])
    assert source in "".join(part for part in capsys.readouterr().out if part not in " \n│")


def test_a_name_that_looks_like_markup_is_printed_as_it_is(capsys: Captured) -> None:
    gpus.print_known([Known("[red]gpu[/red]", "measured", "/tmp/[bold]/x")])
    out = capsys.readouterr().out
    assert "[red]gpu[/red]" in out
    assert "/tmp/[bold]/x" in out


def test_steps_that_failed_are_rows_of_dashes_with_their_reasons(capsys: Captured) -> None:
    row = StepComparison(StepPlan(name="wide", config={}), "oom", "can't allocate memory")
    print_validation([row])
    out, err = capsys.readouterr()
    (shown,) = [line for line in out.splitlines() if "wide 4x256" in line]
    assert "oom" in shown
    assert shown.count(f" {units.NONE} ") == 10
    assert err == "wide 4x256: can't allocate memory\n"


def test_a_step_is_one_line_and_nothing_has_no_sign(capsys: Captured) -> None:
    plan = StepPlan(name="w1024-d17", config={}, batch=8, seq=1024, optimizer="adamw-fused")
    row = StepComparison(
        plan, "ok", bound="memory", step=Part(0.1175, 0.1178), device=Part(0.1153, 0.11566),
        host=Part(0.02488, 0.02187), peak=Part(1e10, 0.9998e10), measured_share=0.155,
    )  # fmt: skip
    print_validation([row])
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if "w1024-d17 8x1024 fused" in line]
    assert "117.5     117.8" in shown
    assert " 0.0% " in shown
    assert shown.rstrip().endswith("ok")


def test_no_steps_at_all_is_an_empty_table(capsys: Captured) -> None:
    print_validation([])
    assert "Forecast against real steps" in capsys.readouterr().out


def test_a_fit_of_few_rows_has_dashes_for_what_it_cannot_tell(capsys: Captured) -> None:
    quality = Quality("torch/gemm/cold", 1, 0, None, None, None, None, None)
    report = FitReport([quality], [quality], 1, 0, 0, {"oom": 2}, ["one row only"])
    fit.print_fit(report)
    out, err = capsys.readouterr()
    assert "torch/gemm/cold" in out
    assert err == "2 rows of status oom not used\nwarning: one row only\n"


def test_roofs_of_a_part_that_measured_little(capsys: Captured, h200: Profile) -> None:
    print_roofs(replace(h200, ceilings={}, peaks={}, surfaces={}))
    assert "memory copy" not in capsys.readouterr().out
    copies = {f"copy/{size}": h200.ceilings["hbm_copy"] for size in (134217728, 1048576)}
    others = {name: n for name, n in h200.ceilings.items() if not name.startswith("copy/")}
    print_roofs(replace(h200, ceilings={**others, **copies}))
    out = capsys.readouterr().out
    assert "TB/s" in out
    assert out.index(" 1 MiB") < out.index(" 128 MiB")
    assert "gemm, torch, cold" in out


def test_roofs_of_a_projection_say_so(capsys: Captured) -> None:
    print_roofs(find_profile("nvidia-l4"))
    out = capsys.readouterr().out
    assert "EXTRAPOLATED" in out
    assert "Best points, extrapolated" in out


def test_what_a_name_holds_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table("names", ("name",), [["\x1b[31mred\x07[bold]"], ["safe\u202etxt.exe"]])
    console.say("\x1b]0;title\x07")
    shown = capsys.readouterr()
    assert r"\x1b[31mred\x07[bold]" in shown.out
    assert r"safe\u202etxt.exe" in shown.out
    assert shown.err == r"\x1b]0;title\x07" + "\n"
