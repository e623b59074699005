"""What two H200s launched of parallel steps, rank by rank, is what is traced for them; over gloo likewise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flopcast.roofline.stream.ops import op_stream as streams
from studies.imports import ROOT
from studies.parallel.gate import differences, kept, lines, retraced

RECORDED = sorted((ROOT / "tests" / "data").glob("h200x2_*.json.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=[path.name.partition(".json")[0] for path in RECORDED])
def test_what_two_gpus_launched_is_what_is_traced(path: Path) -> None:
    meta, recorded = kept(path)
    assert len(recorded) > 1500
    assert differences(recorded, lines(retraced(meta))) == []


def test_the_records_are_of_every_layout() -> None:
    layouts = {kept(path)[0]["parallel"]["layout"] for path in RECORDED}
    assert layouts == {"ddp=2", "zero1=2", "zero2=2", "fsdp=2", "hsdp=2x1", "tp=2"}


def test_two_real_processes_launch_what_is_traced(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "studies.parallel.record")
    subprocess.run(
        [sys.executable, *launcher, str(tmp_path), "--device", "cpu", "--only", "hsdp"],
        check=True, cwd=ROOT, timeout=300, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    first, second = (streams.load(tmp_path / f"hsdp.rank{rank}.json.gz") for rank in (0, 1))
    assert differences(lines(first), lines(retraced(first.meta))) == []
    assert differences(lines(first), lines(second)) == []


def test_a_difference_is_told() -> None:
    meta = {"device": "cpu"}
    stream = streams.Stream((), (), (), 0, meta=meta)
    other = streams.Stream((streams.Op("aten.relu.default", "forward", (), ()),), (), (), 0, meta=meta)
    (told,) = differences(lines(stream), lines(other))
    assert told.startswith("line 0: recorded nothing | traced forward None launch aten.relu.default")
