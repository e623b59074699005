"""Huge, infinite and misplaced input: refused at once, with the value, what is valid and the option's own name; and the
same step costs the same in every command."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.roofline.gpu.catalogue.prices import load_prices
from flopcast.roofline.gpu.library import profiles
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.page import assemble
from flopcast.roofline.views.terminal import console
from flopcast.roofline.views.terminal import forecast as terminal_forecast

H200 = "nvidia-h200"
Command = Callable[..., Any]
HUGE = "99999999999999999999999999"

REFUSED = {
    "a width beyond numbers": (f"predict --gpu {H200} --width {HUGE}", ("width", HUGE, "at most 10000000")),
    "such a width with its depth": (f"predict --gpu {H200} --width {HUGE} --depth 4", ("width", "at most 10000000")),
    "heads beyond numbers": (f"predict --gpu {H200} --width 512 --heads {HUGE}", ("heads", "at most 10000000")),
    "a ladder beyond numbers": (f"cost --depth-law ln --widths 1{'0' * 400}", ("width", "at most 10000000")),
    "a batch beyond numbers": (
        f"predict --gpu {H200} --width 512 --batch {HUGE}", (f"batch is {HUGE}", "at most 1048576")),
    "a length beyond numbers": (f"plan --width 512 --seq {HUGE}", (f"seq is {HUGE}", "at most 16777216")),
    "a ladder's batch": ("cost --widths 512 --batch 2000000", ("batch is 2000000", "at most 1048576")),
    "too many micro-batches": (f"predict --gpu {H200} --width 512 --accumulate 1025", ("accumulate", "at most 1024")),
    "too many tokens at once": (
        f"explain --gpu {H200} --width 512 --batch 1000 --seq 2000000", ("1000 x 2000000 tokens", "1073741824")),
    "endless tokens": ("plan --config qwen3-0.6b --tokens 1e400", ("--tokens", "'1e400'", "at most 1e+18")),
    "endless tokens a parameter": (
        "plan --config qwen3-0.6b --tokens-per-param inf", ("--tokens-per-param is inf", "at most 1e+09")),
    "an endless budget": ("plan --config qwen3-0.6b --budget-usd inf --json", ("--budget-usd is inf", "1e+12")),
    "a price that is no price": (f"predict --gpu {H200} --width 512 --price {H200}=1e300", ("'1e300'", "10,000")),
    "prices of an unknown GPU": ("prices --gpu h300", ("--gpu h300", "flopcast prices")),
    "prices of a day before them": (f"prices --gpu {H200} --on 2001-01-01", (H200, "--on 2001-01-01")),
    "a figure of another kind": (f"widths --gpu {H200} --around 1024 --figure f.pdf", ("--figure 'f.pdf'", ".svg")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_extremes_are_refused(flopcast: Command, case: str) -> None:
    command, said = REFUSED[case]
    result = flopcast(*command.split())
    assert (result.code, result.out) == (2, ""), result
    assert [part for part in said if part not in result.err] == []


def test_help_shows_what_is_to_be_typed(flopcast: Command) -> None:
    shown = " ".join(flopcast("predict", "--help").out.replace("│", " ").split())
    assert "package.module:factory" in shown  # `:factory:` would be drawn as a little factory
    assert "torch, triton, or best, for each the faster of both by the profile" in shown
    assert "flopcast[prices]" in flopcast("prices", "--help").out.replace("\n", "")


def test_a_step_costs_the_same_in_every_command(flopcast: Command, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("width\n512\n")
    predicted = flopcast("predict", "--gpu", H200, "--width", 512, "--json").document
    planned = flopcast("plan", "--gpus", H200, "--width", 512, "--batch", 4, "--seq", 256, "--json").document["plans"][
        0
    ]
    point = flopcast("cost", "--gpus", H200, "--widths", 512, "--json").document["points"][0]
    assert flopcast("sweep", "--gpu", H200, "--from", tmp_path / "in.csv", "--out", tmp_path / "out.csv").code == 0
    (row,) = csv.DictReader((tmp_path / "out.csv").open())
    for name in ("step_seconds", "bound"):
        assert predicted[name] == planned[name] == point[name]
    for name in ("step_seconds_low", "step_seconds_high", "device_seconds", "host_seconds", "flops_counted"):
        assert predicted[name] == point[name]
        assert float(row[name]) == pytest.approx(predicted[name], rel=1e-6)
    assert predicted["usd_per_step"] / 1024 * 1e6 == pytest.approx(planned["usd_per_million_tokens"], rel=1e-12)


def test_a_million_tokens_of_a_step_of_micro_batches_are_all_counted(capsys: pytest.CaptureFixture[str]) -> None:
    price = load_prices()[0]
    one, four = Run(batch=4, seq=256), Run(batch=4, seq=256, accumulate=4, checkpoint="full")
    found = forecast(make_config(width=512, depth=4), one, find_profile(H200), price=price)
    assert found.usd_per_step is not None
    terminal_forecast.print_forecast(found, one)
    alone = capsys.readouterr().out
    terminal_forecast.print_forecast(replace(found, step_seconds=4 * found.step_seconds), four)
    text = " ".join(capsys.readouterr().out.split())
    per_million = f"${found.usd_per_step / 1024 * 1e6:.3g} per million tokens"
    assert per_million in alone
    assert per_million in text
    assert "4 x 256 tokens, 4 micro-batches per step" in text
    assert "checkpoint full" in text
    assert "micro-batches" not in alone


def test_a_folder_of_kernels_is_no_folder_of_steps(flopcast: Command, root: Path, tmp_path: Path) -> None:
    kernels = root / "reports" / "nvidia-h200" / "measurements" / "gpu0"
    result = flopcast("validate", "--gpu", H200, "--steps-from", kernels, "--out", tmp_path / "out")
    assert (result.code, result.out) == (2, "")
    assert "holds no real steps" in result.err
    assert not (tmp_path / "out").exists()


def test_a_narrow_terminal_cuts_no_number() -> None:
    rows = [["a100-80gb-pcie", "4", "7,308", "8.1%", "18.9 (15-30)", "1,811 (1,650-2,300)", "0.068", "host"]] * 2
    columns = ("GPU", "batch", "tokens/s", "MFU", "days", "$", "$/Mtoken", "bound by")
    written = io.StringIO()
    narrow = console.UncutConsole(width=76, file=written)
    narrow.print(console.table("Plans", columns, rows, ruled=False))
    shown = written.getvalue().split()
    assert [word for cell in rows[0] for word in cell.split() if word not in shown] == []


def test_no_kernel_beats_its_memory_many_times(flopcast: Command) -> None:
    best = flopcast("roofline", "--gpu", H200, "--json").document["best"]
    cold = [row for row in best if row["unit"] == "B/s" and row["cache"] == "cold"]
    assert len(cold) >= 10
    assert [row for row in cold if row["share"] > 3] == []


def test_a_day_without_a_price_is_told(flopcast: Command, tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("width,batch\n512,4\n512,0\n")
    for command, *options in (
        ("predict", "--width", 512),
        ("explain", "--width", 512),
        ("sweep", "--from", tmp_path / "steps.csv", "--out", tmp_path / "out.csv"),
    ):
        result = flopcast(command, "--gpu", H200, *options, "--on", "1999-01-01")
        assert result.code == 0
        assert f"no price of {H200}" in result.err
    assert "1 could not be done: column `reason` says why" in result.err


def test_long_names_of_modules_keep_their_end(flopcast: Command) -> None:
    found = flopcast("explain", "--gpu", H200, "--module", "flopcast.microbench.zoo:resnet50", "--batch", 2)
    shown = [line.split("\u2502")[1].strip() for line in found.out.splitlines() if "\u2502 \u2026" in line]
    assert any(name.endswith(".normalization") for name in shown)
    assert any(name.endswith(".shortcut.convolution") for name in shown)
    assert len(set(shown)) == len(shown)


def test_a_table_of_another_kind_is_refused_at_once(flopcast: Command, tmp_path: Path) -> None:
    alien = tmp_path / "profile.json.gz"
    alien.write_bytes(gzip.compress(json.dumps({"x": list(range(150_000))}).encode()))
    result = flopcast("import", alien, "--gpu", "nvidia-l4", "--source", "me", "--out", tmp_path / "out.json")
    assert (result.code, result.out) == (2, "")
    assert "profile.json.gz is JSON: give a CSV file" in result.err
    alien.write_text(",".join(f"c{number}" for number in range(150_000)) + "\n1\n")
    result = flopcast("import", alien, "--gpu", "nvidia-l4", "--source", "me", "--out", tmp_path / "out.json")
    assert (result.code, result.out) == (2, "")
    assert "latency_ms" in result.err
    assert len(result.err) < 1500


def test_what_takes_seconds_says_so(flopcast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, that is."""
    monkeypatch.setattr("flopcast.progress.QUIET_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("TERM", raising=False)
    monkeypatch.setattr(profiles, "user_folder", lambda: tmp_path / "profiles")
    monkeypatch.setattr(assemble, "build_report", lambda *a, **k: tmp_path / "page.html")
    monkeypatch.setattr(assemble, "print_summary", lambda *a: None)
    measured = Path(__file__).resolve().parents[3] / "reports" / "nvidia-h200" / "measurements" / "gpu5" / "run2"
    table = tmp_path / "table.csv"
    rows = [f"gemm,{256 * i},1024,1024,nt,bf16,{0.01 * i}" for i in range(1, 25)]
    table.write_text("\n".join(["op,m,n,k,layout,dtype,latency_ms", *rows, ""]))
    for wanted, command in {
        ("drawing",): ("roofline", "--gpu", "nvidia-l4", "--out", tmp_path / "roofs.png"),
        ("reading", "fitting"): ("fit", measured, "--out", tmp_path / "profile.json.gz"),
        ("reading", "fitting", "comparing, drawing"): (
            "report",
            "--measurements",
            measured,
            "--out",
            tmp_path / "page",
        ),
        ("refining",): ("import", table, "--gpu", "nvidia-l4", "--source", "me", "--out", tmp_path / "l4.json.gz"),
        ("comparing",): ("compare", H200, H200),
    }.items():
        result = flopcast(*command)
        assert result.code == 0, result.err
        assert all(f"\r{label} ... " in result.err for label in wanted), command
