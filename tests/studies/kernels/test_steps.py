"""Steps on our kernels beside torch's: what counts as agreeing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from studies.kernels import steps

TORCH = steps.Row("torch", "eager", 8, 4, 256, 0.05, 0.04, 0.06, 15, (12.0, 10.0))
OURS = replace(TORCH, contender="ours", mode="compile")


def test_losses_are_held_against_torchs_eager_step_of_the_same_size() -> None:
    assert not list(steps.disagreements([TORCH, replace(OURS, losses=(12.1, 9.9))]))
    assert not list(steps.disagreements([TORCH, replace(OURS, layers=28, losses=(5.0, 5.0))]))
    (said,) = steps.disagreements([replace(OURS, losses=(12.1, 9.7)), TORCH])
    assert said.startswith("ours, compile, 8 layers, 4 x 256: losses (12.1, 9.7)")
    (said,) = steps.disagreements([TORCH, replace(OURS, losses=(), reason="RuntimeError: no")])
    assert said.endswith("RuntimeError: no")


WORKER = """
import json, sys
print("ready", flush=True)
assert sys.stdin.readline() == "go\\n"
print("a line that torch printed")
for row in json.loads(sys.argv[1]):
    print(json.dumps(row), flush=True)
"""


def test_workers_measure_one_after_the_other_and_a_stuck_one_is_ended(tmp_path: Path) -> None:
    def start(code: str, *rows: steps.Row) -> subprocess.Popen[str]:
        given = json.dumps([asdict(row) for row in rows])
        return subprocess.Popen(
            [sys.executable, "-c", code, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    both = [start(WORKER, TORCH), start(WORKER, OURS, OURS)]
    assert steps._collect(both, tmp_path / "steps.csv", time.monotonic() + 60) == [TORCH, OURS, OURS]
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 4
    stuck = start("import time; time.sleep(60)")
    assert steps._collect([stuck], tmp_path / "steps.csv", time.monotonic()) == []
    assert stuck.wait(10) != 0
    for process in (*both, stuck):
        process.communicate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs steps there")
def test_without_a_gpu_it_says_so(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main([str(tmp_path)]) == 1
    assert "needs a GPU" in capsys.readouterr().err
