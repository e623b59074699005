"""Real steps of two processes, recorded over gloo, are what is traced for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flopcast.roofline.stream.ops import op_stream as streams
from studies.imports import ROOT
from studies.parallel.gate import differences, retraced


def test_two_real_processes_launch_what_is_traced(tmp_path: Path) -> None:
    cases = ("fsdp", "zero1", "hsdp", "tp")  # zero1 is DistributedDataParallel too
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "studies.parallel.record")
    subprocess.run(
        [sys.executable, *launcher, str(tmp_path), "--device", "cpu", "--only", ",".join(cases)],
        check=True, cwd=ROOT, timeout=300, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for case in cases:
        recorded = [streams.load(tmp_path / f"{case}.rank{rank}.json.gz") for rank in (0, 1)]
        assert differences(recorded[0], retraced(recorded[0])) == []
        if case == "zero1":  # each rank updates parameters of its own
            assert differences(recorded[1], retraced(recorded[1])) == []
        else:
            assert differences(*recorded) == []


def test_a_difference_is_told(tmp_path: Path) -> None:
    stream = streams.Stream((), (), (), 0, meta={"device": "cpu"})
    other = streams.Stream((streams.Op("aten.relu.default", "forward", (), ()),), (), (), 0, meta={"device": "cpu"})
    (told,) = differences(stream, other)
    assert told.startswith("op 0: recorded nothing | traced forward None launch aten.relu.default")
