"""What is taken of a row's two readings does not depend on the process that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopcast.kernels.shapes import Gemm, shape_to_json
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS
from flopcast.roofline.gpu.fit.row_seconds import FEWEST_ROWS, graph_gap_of, with_taken

SHAPES = [Gemm(m=256 * i, n=256, k=256, dtype="bf16", layout="nt") for i in range(1, FEWEST_ROWS + 1)]


def rows_of(run: str | None, gap: float) -> list[dict[str, Any]]:
    """The same kernels in a process whose graphs leave `gap` more than the profiler's duration."""
    rows = []
    for i, shape in enumerate(SHAPES):
        seconds = 5e-6 + 0.1e-6 * i
        row = {**EMPTY_FIELDS, "key": shape.key, "backend": "torch", "cache": "hot", "shape": shape_to_json(shape),
               "seconds": seconds + gap, "kernel_seconds": seconds, "kernels": ["k"], "timer": "graph"}  # fmt: skip
        rows.append(row if run is None else {**row, "run": run})
    return rows


def test_processes_of_one_file_are_read_alike() -> None:
    trained, untrained = rows_of("09:00", 0.1e-6), rows_of("10:00", -0.2e-6)
    taken = [row["taken_seconds"] for row in with_taken([*trained, *untrained])]
    assert taken == pytest.approx([row["kernel_seconds"] for row in (*trained, *untrained)])


def test_rows_that_do_not_say_are_of_one_process() -> None:
    old = rows_of(None, 0.1e-6)
    assert [row["taken_seconds"] for row in with_taken(old)] == pytest.approx([row["kernel_seconds"] for row in old])


def test_a_few_rows_are_read_by_the_gap_of_all() -> None:
    most, few = rows_of("09:00", 0.1e-6), rows_of("10:00", 0.3e-6)[:5]
    taken = [row["taken_seconds"] for row in with_taken([*most, *few])][-5:]
    assert taken == pytest.approx([row["kernel_seconds"] for row in few])
    assert taken < [row["seconds"] - 0.05e-6 for row in few]


def test_unaligned_products_profiled_at_a_lower_clock_are_brought_to_the_highest() -> None:
    sides = [(2048, 2, 1980), (2050, 1, 1650), (2056, 1, 1650), (2050, 3, 1980)]  # n, seconds, MHz
    rows = [
        {**EMPTY_FIELDS, "key": str(i), "backend": "torch", "cache": "cold", "kernel_seconds": seconds * 1e-3,
         "shape": shape_to_json(Gemm(m=1024, n=n, k=1024)), "clock_mhz": clock}
        for i, (n, seconds, clock) in enumerate(sides)
    ]  # fmt: skip
    taken = [row["taken_seconds"] for row in with_taken(rows)]
    assert taken == pytest.approx([2e-3, 1e-3 * 1650 / 1980, 1e-3, 3e-3])


def test_a_gap_is_never_below_none() -> None:
    gap = graph_gap_of(rows_of(None, -0.2e-6))
    assert gap is not None
    assert gap.value == 0
    assert graph_gap_of([]) is None


def test_a_row_says_when_its_process_began(tmp_path: Path) -> None:
    machine = {"schema": 1, "machine": "m", "device": {"type": "cuda"}, "stack": {}}
    with Recorder(tmp_path, machine) as recorder:
        for key in "ab":
            recorder.append({**EMPTY_FIELDS, "key": key})
        began = {row["run"] for row in recorder.rows}
    assert len(began) == 1
    with Recorder(tmp_path, machine) as again:
        assert {row["run"] for row in again.rows} == began
