"""Real steps on several GPUs beside their forecasts, from a folder of rows to the command's table."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.validation.parallel import compare_parallel, own_plans, parallel_plans

pytestmark = pytest.mark.usefixtures("cache_of_the_module")

CONFIG = make_config(width=256, depth=3, vocab=1024)
PLAN = StepPlan(name="small", config=CONFIG, batch=2, seq=64, optimizer="adamw-fused", parallel="ddp=2")
MACHINE: Any = {
    "schema": 1, "machine": "m", "device": {"type": "cuda", "name": "NVIDIA H200", "memory_bytes": 150109880320},
    "host": {}, "stack": {"torch": "2.11.0"},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a step that took 20 ms and of one that ran out of memory."""
    common = {**EMPTY_FIELDS, "plan": asdict(PLAN), "gpus": 2, "nodes": 1, "backend": "nccl", "cache": "hot"}
    other = {**asdict(PLAN), "name": "large"}
    with Recorder(tmp_path / "steps", MACHINE) as recorder:
        recorder.append({
            **common, "key": PLAN.parallel_key, "value": 0.02, "seconds": 0.02, "host_seconds": 0.018,
            "peak_bytes": [9_000_000, 10_000_000], "used_bytes": [1, 2],
        })  # fmt: skip
        recorder.append({
            **common, "key": PLAN.parallel_kernels_key, "compute_seconds": [1e-3, 3e-3],
            "communication_seconds": [5e-4, 5e-4], "exposed_seconds": [4e-4, 9e-4], "waiting_seconds": [0.0, 6e-4],
        })  # fmt: skip
        recorder.append({**common, "plan": other, "key": "parallel_step/large", "status": "oom", "reason": "no room"})
    return tmp_path / "steps"


def test_each_part_is_held_against_its_forecast(folder: Path) -> None:
    found, failed = compare_parallel(folder, find_profile("nvidia-h200"))
    parts = found.parts
    assert parts["step"].measured == 0.02
    assert parts["step"].low is not None
    assert parts["step"].error == pytest.approx((parts["step"].forecast or 0) / 0.02 - 1)
    assert parts["memory"].measured == 10_000_000
    assert parts["compute"].measured == pytest.approx(2e-3)
    assert parts["exposed"].measured == pytest.approx(3e-4)  # the other's is mostly waiting
    assert all((part.forecast or 0) > 0 for part in parts.values())
    assert (failed.reason, failed.parts) == ("no room", {})


def test_a_folder_is_compared_by_the_command(flopcast: Callable[..., Any], folder: Path) -> None:
    done = flopcast("validate", "--steps-from", folder, "--gpu", "nvidia-h200")
    assert done.code == 0, done.err
    assert "small" in done.out
    assert "1 of 1 steps inside" in done.out or "0 of 1 steps inside" in done.out
    first, second = csv.DictReader((folder / "parallel-validation.csv").open())
    assert (first["parallel"], second["reason"]) == ("ddp=2", "no room")


def test_which_steps_a_layout_is_judged_by() -> None:
    plans = parallel_plans(["ddp=2", "pp=2"], "quick")
    assert {plan.parallel for plan in plans} == {"ddp=2", "pp=2"}
    assert all(plan.accumulate == 4 for plan in plans if plan.parallel == "pp=2")
    for layouts, suite in ((["ddp"], "quick"), (["ddp=1"], "quick"), (["ddp=2"], "fused")):
        with pytest.raises(UsageError, match="valid"):
            parallel_plans(layouts, suite)


def test_a_step_of_ones_own_runs_in_each_layout() -> None:
    plans = own_plans(replace(PLAN, parallel="none"), ["fsdp=2", "zero1=2"])
    assert [(plan.parallel, plan.config, plan.batch) for plan in plans] == [
        (layout, CONFIG, PLAN.batch) for layout in ("fsdp=2", "zero1=2")
    ]
    for layout, message in (("tp=3", "tp=3 does not divide heads"), ("fsdp", "fsdp")):
        with pytest.raises(UsageError, match=message):
            own_plans(PLAN, [layout])
