"""Sweeps on the processor, with a stand-in kernel module: every fate is a row, and a re-run continues."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flopcast.errors import RunError, UsageError
from flopcast.kernels.shapes import Gemm, shape_from_json
from flopcast.microbench.records import recorder, records
from flopcast.microbench.records.machine import machine_id
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS
from flopcast.microbench.sweep import cases, sweep
from flopcast.microbench.timing import device
from flopcast.microbench.timing.cpu_timer import CpuTimer
from flopcast.microbench.timing.operands import Operands, Prepare
from flopcast.microbench.timing.policy import CPU_QUICK
from flopcast.microbench.timing.telemetry import Reading
from flopcast.microbench.timing.timer import Timing
from flopcast.roofline.gpu.fit.rows import ceilings_of


def rows(out: Path) -> list[dict[str, Any]]:
    return records.read(out).rows


def test_a_row_holds_all_that_the_contract_names(standin: ModuleType, tmp_path: Path) -> None:
    [case] = standin.cases(1)
    summary = standin.run(tmp_path, [case])
    assert summary.statuses == {"ok": 1}
    [row] = rows(tmp_path)
    assert {"schema", "method", "machine", "time", *EMPTY_FIELDS} <= set(row)
    assert shape_from_json(row["shape"]) == case.shape
    assert (row["key"], row["backend"], row["cache"], row["role"]) == (case.shape.key, "torch", "cold", "fit")
    assert row["timer"] == "wall"
    assert row["seconds"] == row["kernel_seconds"] > 0
    assert row["n"] == len(row["samples"]) >= 2
    assert row["relative_error"] <= row["tolerance"]


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [
        ("unsupported", "unsupported", "needs a part"),
        ("no-gluon", "unsupported", "cannot import name 'gluon'"),
        ("no-module", "error", "ImportError"),
        ("broken", "error", "KeyError"),
        ("oom-prepare", "oom", "Tried to allocate 1 TiB"),
        ("oom-call", "oom", "allocate memory"),
        ("wrong", "incorrect", "above the tolerance"),
        ("nan", "incorrect", "relative error nan"),
    ],
)
def test_a_case_that_fails_is_a_row_and_the_rest_goes_on(
    standin: ModuleType, tmp_path: Path, backend: str, status: str, reason: str
) -> None:
    wanted = [*standin.cases(1, backend), *standin.cases(2)]
    summary = standin.run(tmp_path, wanted)
    assert summary.statuses == {status: 1, "ok": 2}
    [row] = [r for r in rows(tmp_path) if r["backend"] == backend]
    assert row["status"] == status
    assert reason in row["reason"]
    assert "\n" not in row["reason"]
    assert row["seconds"] is None


def test_a_re_run_measures_only_what_is_missing(standin: ModuleType, tmp_path: Path) -> None:
    standin.run(tmp_path, standin.cases(3))
    summary = standin.run(tmp_path, standin.cases(5))
    assert (summary.measured, summary.skipped) == (2, 3)
    assert len({r["key"] for r in rows(tmp_path)}) == len(rows(tmp_path)) == 5
    assert standin.run(tmp_path, standin.cases(5)).measured == 0


def test_failed_rows_are_retried_only_when_asked(standin: ModuleType, tmp_path: Path) -> None:
    wanted = standin.cases(1, "oom-prepare")
    standin.run(tmp_path, wanted)
    assert standin.run(tmp_path, wanted).measured == 0
    assert standin.run(tmp_path, wanted, retry=("oom",)).statuses == {"oom": 1}


def test_correctness_is_checked_once_for_cold_and_hot(standin: ModuleType, tmp_path: Path) -> None:
    [case] = standin.cases(1)
    module = standin.StandIn()
    standin.run(tmp_path, [case, cases.Case(shape=case.shape, cache="hot")], module)
    assert module.checked == [case.shape.key]
    assert {r["relative_error"] is not None for r in rows(tmp_path)} == {True}


def test_the_order_is_shuffled_by_the_seed(standin: ModuleType, tmp_path: Path) -> None:
    wanted = standin.cases(12)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        standin.run(tmp_path / name, wanted, seed=seed)
    orders = {name: [r["key"] for r in rows(tmp_path / name)] for name in "abc"}
    assert orders["a"] == orders["b"] != orders["c"]
    assert orders["a"] != [case.shape.key for case in wanted]


def test_a_spent_budget_leaves_the_rest_to_the_next_run(standin: ModuleType, tmp_path: Path) -> None:
    ticks = itertools.count()  # one "second" at each look at the clock
    summary = standin.run(tmp_path, standin.cases(20), budget_seconds=12, clock=lambda: float(next(ticks)))
    assert 0 < summary.measured < 12
    assert summary.measured + summary.remaining == 20
    assert "run again" in str(summary)
    assert standin.run(tmp_path, standin.cases(20)).skipped == summary.measured
    assert len(rows(tmp_path)) == 20


def test_a_full_disk_stops_the_sweep_with_its_rows_intact(
    standin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = itertools.count()
    whole = recorder.write_line

    def write_line(descriptor: int, line: bytes, path: Path) -> None:
        if next(written) == 3:
            raise RunError(f"no room to write {path}")
        whole(descriptor, line, path)

    monkeypatch.setattr(recorder, "write_line", write_line)
    with pytest.raises(RunError, match="no room"):
        standin.run(tmp_path, standin.cases(9))
    assert len(rows(tmp_path)) == 3


class Restless(CpuTimer):
    """A device whose clock never holds still, and which a power cap slows in the midst of a sweep."""

    def warm_up(self) -> bool:
        return False

    def time(self, prepare: Prepare, operands: Operands, cache: str) -> Timing:
        reading = Reading(clock_mhz=1200.0, power_w=700.0, throttle_reasons=("sw_power_cap",))
        return replace(super().time(prepare, operands, cache), reading=reading)


def test_throttled_rows_are_labelled_and_kept_and_an_unsettled_clock_is_told(
    standin: ModuleType, tmp_path: Path
) -> None:
    with Recorder(tmp_path, device.describe(torch.device("cpu"))) as recorder:
        summary = sweep.run_sweep(
            standin.cases(2), recorder=recorder, timer=Restless(standin.POLICY), suite="quick",
            module_for=lambda shape: standin.StandIn(),
        )  # fmt: skip
    assert summary.statuses == {"ok": 2}
    assert summary.warnings == [sweep.UNSETTLED]
    for row in rows(tmp_path):
        assert (row["throttled"], row["throttle_reasons"]) == (True, ["sw_power_cap"])
        assert (row["clock_mhz"], row["power_w"]) == (1200.0, 700.0)
        assert row["seconds"] > 0


def test_a_result_is_checked_before_it_is_timed(standin: ModuleType, tmp_path: Path) -> None:
    """A wrong kernel never reaches the timer."""
    timed: list[str] = []

    class Watched(CpuTimer):
        def time(self, prepare: Prepare, operands: Operands, cache: str) -> Timing:
            timed.append(cache)
            return super().time(prepare, operands, cache)

    module = standin.StandIn()
    with Recorder(tmp_path, device.describe(torch.device("cpu"))) as recorder:
        sweep.run_sweep(
            [*standin.cases(2, "wrong"), *standin.cases(1)], recorder=recorder, timer=Watched(standin.POLICY),
            suite="quick", module_for=lambda shape: module,
        )  # fmt: skip
    assert len(module.checked) == 3
    assert timed == ["cold"]


FULL = """
import resource, sys
from pathlib import Path
import runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
standin = runpy.run_path(sys.argv[1])
from flopcast.errors import FlopcastError
try:
    standin["run"](Path(sys.argv[3]), standin["cases"](40))
except FlopcastError as fault:
    print(fault)
    raise SystemExit(fault.exit_code)
"""


def sweep_on_a_small_disk(standin: ModuleType, folder: Path, size: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FULL, str(standin.__file__), str(size), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_disk_that_fills_amid_a_sweep_keeps_its_rows_and_the_next_run_continues(
    standin: ModuleType, tmp_path: Path
) -> None:
    """A real process whose file may not grow beyond 6 kB, in the midst of a line."""
    stopped = sweep_on_a_small_disk(standin, tmp_path, 6000)
    assert stopped.returncode == 1, stopped.stderr
    assert "no room to write" in stopped.stdout
    assert "All finished rows are in it" in stopped.stdout
    assert "Traceback" not in stopped.stderr
    found = records.read(tmp_path)
    assert not found.warnings
    assert 3 < len(found.rows) < 40
    assert standin.run(tmp_path, standin.cases(40)).skipped == len(found.rows)
    assert len({row["key"] for row in rows(tmp_path)}) == len(rows(tmp_path)) == 40


def test_a_full_file_system_keeps_its_rows(standin: ModuleType, tmp_path: Path) -> None:
    """The same with a file system of 16 kB that is really full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        stopped = sweep_on_a_small_disk(standin, disk / "out", 1 << 30)
        assert stopped.returncode == 1, stopped.stderr
        assert "no room to write" in stopped.stdout
        found = records.read(disk / "out")
        assert not found.warnings
        assert 1 < len(found.rows) < 40
        kept = shutil.copytree(disk / "out", tmp_path / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert standin.run(kept, standin.cases(40)).skipped == len(found.rows)


def test_another_stack_is_refused(standin: ModuleType, tmp_path: Path) -> None:
    standin.run(tmp_path, standin.cases(1))
    machine = device.describe(torch.device("cpu"))
    other = machine_id(machine["device"], {**machine["stack"], "torch": "9.9.9"})
    with pytest.raises(UsageError, match=rf"{machine['machine']}.*{other}"):
        Recorder(tmp_path, {**machine, "machine": other})


def test_kill_and_resume_with_a_real_process(standin: ModuleType, tmp_path: Path) -> None:
    """kill -9 in mid-sweep: whole rows stay, the lock is free, and the re-run measures only what is missing.
    While the process lives, a second one is refused."""
    count = 300
    child = subprocess.Popen([sys.executable, standin.__file__, str(tmp_path), str(count)])
    try:
        path = tmp_path / records.MEASUREMENTS
        for _ in range(600):
            if path.exists() and path.read_bytes().count(b"\n") >= 5:
                break
            assert child.poll() is None
            time.sleep(0.1)
        with pytest.raises(UsageError, match=rf"another process \(pid {child.pid}\)"):
            standin.run(tmp_path, standin.cases(count))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    with path.open("ab") as file:  # the line in flight, which this kill may not have torn
        file.write(b'{"schema":1,"key":"gemm/nt/fp')
    found = records.read(tmp_path)
    survived = {r["key"] for r in found.rows}
    assert 5 <= len(survived) < count
    assert "torn" in found.warnings[0]
    summary = standin.run(tmp_path, standin.cases(count))
    assert summary.skipped == len(survived)
    assert summary.measured == count - len(survived)
    keys = [r["key"] for r in rows(tmp_path) if r["key"] != "scalar/reference"]
    assert len(keys) == len(set(keys)) == count


def test_a_product_timed_all_along_tells_how_much_the_processor_varies(
    standin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.01, None, *[0.01, 0.02] * 5, *[None] * 9])
    monkeypatch.setattr(CpuTimer, "reference_seconds", lambda self: next(seconds))
    monkeypatch.setattr("flopcast.microbench.timing.telemetry.OthersShare.__call__", lambda self: 0.5)
    wanted = [cases.Case(shape=Gemm(m=8, n=8, k=k, dtype="fp32", layout="nt"), cache="hot") for k in range(1, 13)]
    with Recorder(tmp_path, device.describe(torch.device("cpu"))) as recorder:
        timer = CpuTimer(replace(CPU_QUICK, warm_up_seconds=0.0))
        summary = sweep.run_sweep(wanted, recorder=recorder, timer=timer, suite="quick")
    assert summary.warnings == ["other processes kept 50% of the cores busy: the times are those of a busy machine"]
    *timed, told = rows(tmp_path)
    assert {row["others_share"] for row in timed} == {0.5}
    assert (told["key"], told["value"], told["n"]) == ("scalar/reference", 0.01, 11)
    assert ceilings_of([told])["reference"].high > 0.014


def test_real_matrix_products_on_the_processor(standin: ModuleType, tmp_path: Path) -> None:
    wanted = [
        cases.Case(shape=Gemm(m=64, n=64, k=64, dtype="fp32", layout=layout), cache=cache)
        for layout in ("nt", "nn", "tn")
        for cache in ("cold", "hot")
    ]
    wanted.append(cases.Case(shape=Gemm(m=64, n=64, k=64), backend="no-such-backend"))
    with Recorder(tmp_path, device.describe(torch.device("cpu"))) as recorder:
        summary = sweep.run_sweep(wanted, recorder=recorder, timer=CpuTimer(standin.POLICY), suite="quick")
    assert summary.statuses == {"ok": 6, "error": 1}
