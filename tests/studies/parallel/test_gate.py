"""What two H200s launched of parallel steps, rank by rank, is what is traced for them; over gloo likewise."""

from __future__ import annotations

import os
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pytest
import torch

from flopcast.roofline.stream.ops import op_stream as streams
from studies.imports import ROOT
from studies.parallel.gate import differences, kept, lines, retraced

# Layouts whose calls change with torch: exactly those of the version that was recorded, and nearly so of others.
OF_ONE_VERSION = ("h200x2_pp", "h200x2_pp-gpipe", "h200x2_cp", "h200x2_ep")
RECORDED = sorted((ROOT / "tests" / "data").glob("h200x2_*.json.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=[path.name.partition(".json")[0] for path in RECORDED])
def test_what_two_gpus_launched_is_what_is_traced(path: Path) -> None:
    meta, recorded = kept(path)
    if meta.get("finetune") == "lora":
        pytest.importorskip("peft")
    traced = lines(retraced(meta))
    assert len(recorded) > 1000
    if path.name.partition(".")[0] not in OF_ONE_VERSION or torch.__version__.startswith(meta["torch"]):
        assert differences(recorded, traced) == []
        return
    # torch 2.13 makes ring attention's indices anew, and a zero by another call; it sends by itself what it can
    recorded, traced = ([line.partition(" lane ")[0] for line in found] for found in (recorded, traced))
    changed = [line for line in unified_diff(recorded, traced, n=0, lineterm="") if line[:2] not in ("@@", "--", "++")]
    assert len(changed) <= 8


def test_the_records_are_of_every_layout() -> None:
    layouts = {kept(path)[0]["parallel"]["layout"] for path in RECORDED}
    assert layouts == {
        "ddp=2",
        "zero1=2",
        "zero2=2",
        "fsdp=2",
        "hsdp=2x1",
        "tp=2",
        "pp=2",
        "pp=2:gpipe",
        "cp=2",
        "ep=2",
    }


def test_two_real_processes_launch_what_is_traced(tmp_path: Path) -> None:
    cases = ("hsdp", "fsdp-last")
    launched = ("-m", "tests.quick_bf16", "studies.parallel.record")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *launched)
    subprocess.run(
        [sys.executable, *launcher, str(tmp_path), "--device", "cpu", "--only", ",".join(cases)],
        check=True, cwd=ROOT, timeout=300, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for case in cases:
        first, second = (streams.load(tmp_path / f"{case}.rank{rank}.json.gz") for rank in (0, 1))
        assert differences(lines(first), lines(retraced(first.meta))) == []
        assert differences(lines(first), lines(second)) == []


def test_a_difference_is_told() -> None:
    meta = {"device": "cpu"}
    stream = streams.Stream((), (), (), 0, meta=meta)
    other = streams.Stream((streams.Op("aten.relu.default", "forward", (), ()),), (), (), 0, meta=meta)
    (told,) = differences(lines(stream), lines(other))
    assert told.startswith("line 0: recorded nothing | traced forward None launch aten.relu.default")
