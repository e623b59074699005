"""Ceilings: real ones on the processor, on a GPU within what any part can do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flopcast.kernels.references import BackendUnavailable
from flopcast.microbench.records import records
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.sweep import ceilings, scalars
from flopcast.microbench.sweep import ceilings as sweep_ceilings
from flopcast.microbench.sweep.work import Summary
from flopcast.microbench.timing import device, make_timer
from flopcast.microbench.timing.cpu_timer import CpuTimer
from flopcast.microbench.timing.policy import CPU_QUICK, QUICK
from flopcast.microbench.timing.timer import Timer

SHORT = replace(CPU_QUICK, sustained_seconds=0.05, timeout_seconds=0.02, warm_up_seconds=0.0, scalar_repeats=2)


def test_ceilings_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "CPU_MATRIX_FLOPS", 2 * 128**3)
    monkeypatch.setitem(ceilings.BANDWIDTH_BYTES, "cpu", 1 << 24)

    def run() -> Summary:
        with Recorder(tmp_path, device.describe(torch.device("cpu"))) as recorder:
            return scalars.run_scalars(recorder=recorder, timer=CpuTimer(SHORT), suite="quick")

    summary = run()
    rows = {row["key"]: row for row in records.read(tmp_path).rows}
    assert set(summary.statuses) == {"ok"}
    assert {
        "scalar/launch", "scalar/matrix_burst/fp32", "scalar/matrix_sustained/bf16", "scalar/hbm_copy",
        "scalar/hbm_read", "scalar/hbm_write", "scalar/l2_copy", "scalar/kernel_floor",
    } <= set(rows)  # fmt: skip
    for row in rows.values():
        assert row["shape"] is None
        assert row["value"] > 0
        assert row["unit"] in ("seconds", "flops_per_second", "bytes_per_second")
    assert run().measured == 0


def test_working_sets_are_swept_through_the_end_of_the_cache() -> None:
    quick, standard, full = (scalars.scalar_measures(CpuTimer(SHORT), s) for s in ("quick", "standard", "full"))
    assert set(quick) < set(standard) == set(full)
    sizes = [int(key.split("/")[2]) for key in standard if key.startswith("scalar/copy/")]
    assert sizes == sorted(sizes)
    assert {1 << power for power in range(18, 31)} <= set(sizes)  # rows of older runs stay comparable
    near = [size for size in sizes if 16 << 20 <= size <= 128 << 20]
    assert max(b / a for a, b in pairwise(near)) <= 1.5
    moved = sweep_ceilings.copy_bandwidth(CpuTimer(SHORT), 1 << 16)
    assert moved.value > 0


def test_a_repeated_read_needs_a_gpu() -> None:
    with pytest.raises(BackendUnavailable, match="triton"):
        ceilings.cache_read(CpuTimer(SHORT), 1 << 20)


def test_a_ceiling_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> scalars.Measure:
        def measure(timer: Timer) -> sweep_ceilings.Scalar:
            raise error

        return measure

    measures = {"scalar/a": fails(NotImplementedError("no such unit")), "scalar/b": fails(ValueError("bug"))}
    monkeypatch.setattr(scalars, "scalar_measures", lambda timer, suite: measures)
    with Recorder(tmp_path, device.describe(torch.device("cpu"))) as recorder:
        scalars.run_scalars(recorder=recorder, timer=CpuTimer(SHORT), suite="quick")
        assert [(row["status"], row["reason"], row["value"]) for row in recorder] == [
            ("unsupported", "no such unit", None),
            ("error", "bug", None),
        ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_ceilings_of_a_gpu(tmp_path: Path) -> None:
    device_ = torch.device("cuda", 0)
    with Recorder(tmp_path, device.describe(device_)) as recorder:
        made = make_timer.make_timer(device_, QUICK)
        scalars.run_scalars(recorder=recorder, timer=made, suite="quick")
        rows = {row["key"].removeprefix("scalar/"): row for row in recorder}
    needed = ("launch", "sync", "launch_queue", "kernel_floor", "kernel_floor_cupti", "kernel_gap", "hbm_copy")
    assert {name: rows[name]["reason"] for name in needed if rows[name]["status"] != "ok"} == {}
    assert 1e-6 < rows["launch"]["value"] < 1e-4
    assert 5e-7 < rows["kernel_floor"]["value"] < 2e-5
    assert 1e-7 < rows["kernel_gap"]["value"] < 2e-5
    assert 100 < rows["launch_queue"]["value"] < 4096
    assert rows["l2_copy"]["value"] > rows["hbm_copy"]["value"] > 1e11
    held, spilt = (ceilings.cache_read(made, size).value for size in (16 << 20, 1 << 29))
    assert held > rows["hbm_read"]["value"]
    assert spilt < 1.2 * rows["hbm_read"]["value"]
