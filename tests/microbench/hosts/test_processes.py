"""A host is calibrated in several fresh processes, whose spread is the interval of the next."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flopcast.microbench.hosts.processes import run_processes
from flopcast.microbench.recipe.plans import HostPlan, of_process, without_process
from flopcast.microbench.records import records
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.timing.device import describe
from flopcast.roofline.gpu.fit.folder import fit_host_folder
from flopcast.roofline.gpu.fit.host_calibration import host_plan

# Stands for a process that takes its turn: prints rows of its own pace, slower from turn to turn, or dies at a turn.
FAKE = """
import json, sys
task, path, dies_at = json.loads(sys.argv[3]), sys.argv[1], int(sys.argv[2])
assert sys.stdin.readline() == "go\\n"
turn = len(open(path).readlines())
if turn == dies_at: sys.exit("the GPU is lost")
open(path, "a").write("a turn\\n")
seconds = {d: 1e-3 * (1 + 0.1 * turn) * int(d) for d in task["plan"]["configs"]}
print(json.dumps([
    {"key": f"host/qwen3-adamw/depth{d}/{phase}", "status": "ok", "value": s, "samples": [s] * 4, "n": 4}
    for d, s in seconds.items() for phase in ("forward", "backward", "optimizer", "zero_grad", "step", "steady")
]))
"""


@pytest.fixture
def plan() -> HostPlan:
    return host_plan("cpu")


def fake(tmp_path: Path, dies_at: int = -1) -> tuple[str, ...]:
    return (sys.executable, "-c", FAKE, str(tmp_path / "turns"), str(dies_at))


def run(plan: HostPlan, folder: Path, **options: Any) -> Any:
    with Recorder(folder, describe(torch.device("cpu"))) as recorder:
        return run_processes(plan, recorder=recorder, device="cpu", suite="host", **options)


def test_each_process_takes_its_turn_and_the_next_run_measures_what_is_missing(plan: HostPlan, tmp_path: Path) -> None:
    (tmp_path / "turns").touch()
    out = tmp_path / "out"
    first = run(plan, out, count=4, command=fake(tmp_path, dies_at=2))
    assert first.warnings == [f"process {n} measured nothing: the GPU is lost" for n in (2, 3)]
    kept = {without_process(row["key"])[1] for row in records.read(out).rows}
    assert kept == {0, 1}  # finished processes are kept
    again = run(plan, out, count=4, command=fake(tmp_path))
    assert (again.skipped, again.warnings) == (2, [])
    assert {without_process(row["key"])[1] for row in records.read(out).rows} == {0, 1, 2, 3}
    assert run(plan, out, count=4, command=fake(tmp_path)).measured == 0


def test_real_processes_calibrate_a_host_and_their_spread_is_its_interval(plan: HostPlan, tmp_path: Path) -> None:
    short = replace(plan, rounds=1, steps_per_round=1)
    found = run(short, tmp_path, count=2)
    assert found.warnings == []
    assert found.statuses["ok"] == 2 * len(plan.configs) * 6
    host = fit_host_folder(tmp_path)
    assert len(host.layers["step"]["processes"]) == 2


def test_the_key_names_the_process() -> None:
    key = of_process("host/qwen3-adamw/depth6/forward", 3)
    assert key == "host/qwen3-adamw/process3/depth6/forward"
    assert without_process(key) == ("host/qwen3-adamw/depth6/forward", 3)
    assert without_process("host/qwen3-adamw/depth6/forward") == ("host/qwen3-adamw/depth6/forward", None)
