"""Real steps among two processes of this machine (gloo): timed, and what cannot be built."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flopcast.microbench.collectives import launch
from flopcast.microbench.ranks import worker
from flopcast.microbench.ranks.measure import Kernel, spent
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records import records
from flopcast.microbench.records.rows import ParallelStepRow, select
from flopcast.roofline.stream.model.models import make_config

CONFIG = make_config(width=64, depth=2, heads=2, kv_heads=1, head_dim=32, vocab=512)
PLAN = StepPlan(
    name="tiny", config=CONFIG, batch=1, seq=16, optimizer="adamw-fused", parallel="ddp=2", group="parallel"
)


def test_steps_are_timed_and_what_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.THREADS, os.environ.get(launch.THREADS, "1"))
    plans = [PLAN, replace(PLAN, name="wrong", config={**CONFIG, "model_type": "qwen9"})]
    task = worker.Task(str(tmp_path / "out"), "gloo", [asdict(plan) for plan in plans])
    launch.start(worker.WORKER, lambda fault: worker.as_text(replace(task, fault=fault)), 2, task.out)
    rows = select(records.read(tmp_path / "out").rows, ParallelStepRow)
    assert [row["plan"]["name"] for row in rows] == ["tiny", "wrong"]
    ran, wrong = rows
    assert (ran["status"], ran["gpus"], ran["key"]) == ("ok", 2, PLAN.parallel_key)
    assert ran["value"] is not None
    assert 0 < ran["value"] < 60
    assert len(ran["peak_bytes"]) == len(ran["rank_host_seconds"]) == 2
    assert wrong["status"] == "error"
    assert "qwen9" in (wrong["reason"] or "")


def test_time_is_told_apart() -> None:
    """One rank comes a second late to the collective, half of which runs beside its next kernel."""
    late = [Kernel("gemm", 7, 0.0, 2.0), Kernel("ncclAllReduce", 20, 2.0, 1.0), Kernel("gemm", 7, 2.5, 1.5)]
    early = [Kernel("gemm", 7, 0.0, 1.0), Kernel("ncclAllReduce", 20, 1.0, 2.0), Kernel("gemm", 7, 3.0, 1.0)]
    one, other = spent([late, early])
    assert (one.span, one.compute, one.communication, one.waiting) == (4.0, 3.5, 1.0, 0.0)
    assert (one.overlapped, one.exposed, one.idle) == (0.5, 0.5, 0.0)
    assert (other.communication, other.waiting, other.exposed) == (1.0, 1.0, 2.0)
