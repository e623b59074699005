"""Two runs compared row by row, as `flopcast fit A --repeat B` does."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import DataError
from flopcast.kernels.shapes import Gemm, shape_to_json
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS
from flopcast.roofline.validation import repeatability
from flopcast.roofline.views.terminal.fit import remarks

Command = Callable[..., Any]

SHORT = [Gemm(m=128, n=128, k=64 * i) for i in range(1, 11)]
LONG = [Gemm(m=8192, n=8192, k=512 * i) for i in range(1, 11)]


def row(shape: Gemm, seconds: float, **fields: Any) -> dict[str, Any]:
    return {
        **EMPTY_FIELDS, "key": shape.key, "backend": "torch", "cache": "cold", "role": "fit",
        "shape": shape_to_json(shape), "seconds": seconds, "kernel_seconds": seconds, **fields,
    }  # fmt: skip


def run(folder: Path, rows: list[dict[str, Any]], machine: str = "m0") -> Path:
    described = {"schema": 1, "machine": machine, "device": {"type": "cuda"}, "host": {}, "stack": {}}
    with Recorder(folder, described) as recorder:
        for one in rows:
            recorder.append(one)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Short rows 2% slower in the second run by the timer and 1% by the profiler, long ones 0.5% faster; the tenth of
    each ten times as far."""
    first = [row(shape, 1e-5) for shape in SHORT] + [row(shape, 1e-3) for shape in LONG]
    second = [row(shape, 1.02e-5 if i < 9 else 1.2e-5, kernel_seconds=1.01e-5) for i, shape in enumerate(SHORT)]
    second += [row(shape, 0.995e-3 if i < 9 else 0.95e-3) for i, shape in enumerate(LONG)]
    scalar = {**EMPTY_FIELDS, "key": "scalar/hbm_copy", "shape": None, "value": 4e12}
    return run(tmp_path / "a", [*first, scalar]), run(tmp_path / "b", [*second[::-1], {**scalar, "value": 4.04e12}])


def test_long_and_short_rows_and_both_readings_are_told_apart(runs: tuple[Path, Path]) -> None:
    found = repeatability.compare_folders(*runs)
    told = {(a.group, a.length, a.reading): a for a in found.agreements}
    short, long = told["all", "short", "timer"], told["all", "long", "timer"]
    assert (short.n, short.median, short.greatest) == (10, pytest.approx(0.02), pytest.approx(0.2))
    assert (long.n, long.median, long.greatest) == (10, pytest.approx(0.005), pytest.approx(0.05))
    assert short.median < short.p90 < short.greatest
    assert (short.signed, long.signed) == (pytest.approx(0.02), pytest.approx(-0.005))
    assert told["all", "short", "profiler"].median == pytest.approx(0.01)
    assert told["all", "short", "profile"].median == pytest.approx(0.01)  # the lesser of the two
    assert told["gemm", "short", "timer"] == repeatability.Agreement(**{**short.__dict__, "group": "gemm"})
    assert told["scalars", "any", "value"].median == pytest.approx(0.01)
    assert found.targets == {"long": True, "short": True}


def test_a_missed_target_is_said(tmp_path: Path) -> None:
    a = run(tmp_path / "a", [row(LONG[0], 1e-3)])
    b = run(tmp_path / "b", [row(LONG[0], 1.02e-3)])
    found = repeatability.compare_folders(a, b)
    assert found.targets == {"long": False, "short": None}
    assert "median of rows of 50 us and more ABOVE 1%, by what the profile takes" in remarks(found)


def test_rows_of_one_run_alone_or_that_failed_keep_their_line(tmp_path: Path) -> None:
    a = run(tmp_path / "a", [row(LONG[0], 1e-3), row(LONG[1], 1e-3), row(LONG[2], 1e-3)])
    b = run(tmp_path / "b", [row(LONG[0], 1e-3), {**row(LONG[1], 1e-3), "status": "oom", "seconds": None}])
    found = repeatability.compare_folders(a, b)
    assert found.unmatched == {"oom in the second run": 1, "not in the second run": 1}
    repeatability.write_csv(found, tmp_path / "out" / "repeatability.csv")
    with (tmp_path / "out" / "repeatability.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["difference"], line["reason"]) for line in lines] == [
        ("0", ""),
        ("", "oom in the second run"),
        ("", "not in the second run"),
    ]
    assert (lines[0]["class"], lines[0]["length"], lines[0]["throttled_a"]) == ("gemm", "long", "false")


def test_other_machines_are_told(tmp_path: Path) -> None:
    a = run(tmp_path / "a", [row(LONG[0], 1e-3)])
    b = run(tmp_path / "b", [row(LONG[0], 1e-3)], machine="m1")
    assert "two cards" in remarks(repeatability.compare_folders(a, b))[0]


def test_the_command_writes_a_table_and_one_document(flopcast: Command, runs: tuple[Path, Path]) -> None:
    a, b = runs
    document = flopcast("fit", a, "--repeat", b, "--json").document
    assert document["repeatability"]["targets"] == {"long": True, "short": True}
    assert len((a / "repeatability.csv").read_text().splitlines()) == 1 + 21
    shown = flopcast("fit", a, "--repeat", b)
    for part in (">= 50 us", "< 50 us", "profiler", "2.00%", "-0.50%"):
        assert part in shown.out
    assert "within 1%" in shown.err


def test_runs_of_two_suites_are_refused(flopcast: Command, tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", [row(LONG[0], 1e-3)]), run(tmp_path / "b", [row(LONG[1], 1e-3)])
    with pytest.raises(DataError, match="no measured row in common"):
        repeatability.compare_folders(a, b)
    refused = flopcast("fit", a, "--repeat", tmp_path / "none")
    assert refused.code == 2
    assert "flopcast bench" in refused.err
