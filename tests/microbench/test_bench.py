"""The engine of `flopcast bench`: what it says of the folder that it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flopcast.errors import DataError
from flopcast.microbench import bench
from flopcast.microbench.records import records
from flopcast.microbench.sweep.work import Summary

CPU = torch.device("cpu")


def run(folder: Path) -> dict[str, Summary]:
    """The host's scalars alone: a fraction of a second."""
    return bench.run_bench(CPU, folder, suite="host", policy="quick", cases=[], hosts=[], host_only=True)


def test_a_torn_line_is_measured_again_and_told(tmp_path: Path) -> None:
    first = run(tmp_path)["launches"]
    assert first.warnings == []
    file = tmp_path / records.MEASUREMENTS
    assert {row["key"] for row in records.read(file).rows} == {"scalar/launch", "scalar/launch_inplace"}
    file.write_bytes(file.read_bytes()[:-30])
    again = run(tmp_path)["launches"]
    assert (again.measured, again.skipped) == (1, 1)
    assert "line 2: the last line is torn" in again.warnings[0]
    assert run(tmp_path)["launches"].measured == 0


def test_a_foreign_file_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / records.MEASUREMENTS).write_text("name,seconds\n")
    with pytest.raises(DataError, match="is it a measurement file"):
        run(tmp_path)
    assert (tmp_path / records.MEASUREMENTS).read_text() == "name,seconds\n"
