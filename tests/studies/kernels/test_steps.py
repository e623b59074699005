"""Steps on our kernels beside torch's: what counts as agreeing."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from studies.kernels import steps, where

TORCH = steps.Row("qwen3-0.6b", "torch", "eager", 8, 4, 256, 0.05, 0.04, 0.06, 15, (12.0, 10.0))
OURS = replace(TORCH, contender="ours", mode="compile")


def test_losses_are_held_against_torchs_eager_step_of_the_same_size() -> None:
    assert not list(steps.disagreements([TORCH, replace(OURS, losses=(12.1, 9.9))]))
    assert not list(steps.disagreements([TORCH, replace(OURS, layers=28, losses=(5.0, 5.0))]))
    (said,) = steps.disagreements([replace(OURS, losses=(12.1, 9.7)), TORCH])
    assert said.startswith("qwen3-0.6b, ours, compile, 8 layers, 4 x 256: losses (12.1, 9.7)")
    (said,) = steps.disagreements([TORCH, replace(OURS, losses=(), reason="RuntimeError: no")])
    assert said.endswith("RuntimeError: no")


WORKER = """
import json, sys
for row in json.loads(sys.argv[1]):
    print("ready", flush=True)
    assert sys.stdin.readline() == "go\\n"
    print("a line that torch printed")
    print(json.dumps(row), flush=True)
"""


def test_one_measures_at_a_time_and_a_stuck_one_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"torch": [TORCH, replace(TORCH, mode="compile")], "ours": [OURS], "broken": []}
    failed = replace(OURS, losses=(), reason="RuntimeError: no")
    code = {"broken": f"print({json.dumps(asdict(failed))!r})", "stuck": "import time; time.sleep(60)"}
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        who = json.loads(command[-1])["contender"]
        given = json.dumps([asdict(row) for row in rows.get(who, [])])
        return popen([sys.executable, "-c", code.get(who, WORKER), given], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    tasks = [{"config": "qwen3-0.6b", "batch": 4, "seq": 256, "contender": who} for who in (*rows, "stuck")]
    found = list(steps.run(tasks, tmp_path, 3, time.monotonic() + 4))
    assert sorted(map(str, found)) == sorted(map(str, [*rows["torch"], OURS, failed]))
    assert len(list(tmp_path.glob("*.log"))) == 4


def test_kernels_are_told_apart_by_name() -> None:
    names = {
        "nvjet_tst_128x256": "products", "void cudnn::fusion::flash_fprop": "attention", "dkdv_kernel": "attention",
        "triton_poi_fused_mul_0": "compiled", "rms_norm_forward_kernel": "norms, rope, activation",
        "both_kernel": "loss", "Memcpy DtoD (Device -> Device)": "copies", "void at::vectorized_elementwise": "others",
        "void at::native::multi_tensor_apply_kernel<FusedAdam>": "optimizer", "at::reduce_kernel": "reductions",
    }  # fmt: skip
    assert {name: steps.class_of(name) for name in names} == names


def test_the_table_says_where_each_millisecond_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = replace(TORCH, kernel_ms=30.0, kernels=700, by_class='{"products": [20.0, 200], "others": [10.0, 500]}')
    ours = replace(
        measured, contender="ours", median_seconds=0.04, kernel_ms=25.0, by_class='{"products": [25.0, 300]}'
    )
    with (tmp_path / "steps.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(TORCH)))
        writer.writeheader()
        writer.writerows(map(asdict, (ours, measured, replace(OURS, reason="RuntimeError: no"))))
    assert where.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    case = "| qwen3-0.6b, 8 layers, 4 x 256 | eager |"
    assert lines[2] == f"{case} torch | 50.00 |  | 30.00 | 700 | 20.00 | 10.00 |"
    assert lines[3] == f"{case} ours | 40.00 | 0.80 | 25.00 | 700 | 25.00 |  |"
    assert where.parts({k: str(v) for k, v in asdict(ours).items()}) == {"products": 25.0, "no kernel": 15.0}
    assert (tmp_path / "steps.png").stat().st_size > 5000


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs steps there")
def test_without_a_gpu_it_says_so(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main([str(tmp_path)]) == 1
    assert "needs a GPU" in capsys.readouterr().err
