"""Benches side by side, with real processes: what one loses no other does, none outlives its parent, all resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flopcast.microbench import fanout
from flopcast.microbench.fanout import Job, run_side_by_side
from flopcast.microbench.records import records
from flopcast.microbench.records.recorder import LOCK, lock_folder

# A bench of rows that take 20 ms each: "bench --device cpu --out DIR [--rows N] [--die-at N] --json".
SLOW_BENCH = """
import argparse, json, os, sys, time
from flopcast.child import end_with_parent
from flopcast.microbench.records.recorder import Recorder
end_with_parent()
parser = argparse.ArgumentParser()
parser.add_argument("command")
for name in ("--device", "--out"):
    parser.add_argument(name)
for name in ("--rows", "--die-at"):
    parser.add_argument(name, type=int, default=1000)
parser.add_argument("--json", action="store_true")
given = parser.parse_args()
measured = 0
with Recorder(given.out, {"schema": 1, "machine": "aaaa", "device": {"type": "cuda"}, "stack": {}}) as recorder:
    for i in range(given.rows):
        if not recorder.is_done(f"k{i}"):
            recorder.append({"key": f"k{i}", "backend": "torch", "cache": "cold", "status": "ok"})
            measured += 1
            time.sleep(0.02)
        if i == given.die_at:
            print("lost the CUDA context", file=sys.stderr)
            raise SystemExit(1)
print(f"visible: {os.environ.get('CUDA_VISIBLE_DEVICES')}", file=sys.stderr)
print(json.dumps({"out": given.out, "parts": {"kernels": f"{measured} measured"}}))
"""
PARENT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background is started deaf to it
from flopcast.microbench import fanout
fanout.COMMAND = (sys.executable, "-c", sys.argv[1])
fanout.run_side_by_side(fanout.jobs(["cpu", "cpu"], Path(sys.argv[2]), ["--rows", "4000"]), print)
"""


@pytest.fixture(autouse=True)
def _slow_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "COMMAND", (sys.executable, "-c", SLOW_BENCH))


def keys(folder: Path) -> list[str]:
    return [row["key"] for row in records.read(folder).rows]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120  # of a busy machine
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rows_in(folder: Path) -> int:
    file = folder / records.MEASUREMENTS
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def test_each_writes_its_own_folder_and_is_heard_under_its_name(tmp_path: Path) -> None:
    said: list[str] = []
    found = run_side_by_side(fanout.jobs(["cpu", "cpu"], tmp_path, ["--rows", "3"]), said.append)
    assert {name: outcome.parts for name, outcome in found.items()} == {
        "gpu0": {"kernels": "3 measured"},
        "gpu1": {"kernels": "3 measured"},
    }
    assert all(outcome.is_done and not outcome.reason for outcome in found.values())
    assert keys(tmp_path / "gpu0") == keys(tmp_path / "gpu1") == ["k0", "k1", "k2"]
    assert {line.split(":")[0] for line in said} == {"gpu0", "gpu1"}


def test_a_process_sees_its_own_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = fanout.jobs(["cuda:0", "cuda:1"], tmp_path, [])
    assert [job.environment for job in made] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert made[1].arguments == ("--device", "cuda", "--out", str(tmp_path / "gpu1"), "--json")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc")  # numbers count within what is visible already
    made = fanout.jobs(["cuda:0", "cuda:1"], tmp_path, ["--rows", "1"])
    assert [job.environment["CUDA_VISIBLE_DEVICES"] for job in made] == ["5", "GPU-abc"]
    said: list[str] = []
    run_side_by_side(made, said.append)
    assert sorted(said) == ["gpu0: visible: 5", "gpu1: visible: GPU-abc"]


def test_one_that_fails_loses_nothing_of_the_others_and_all_resume(tmp_path: Path) -> None:
    whole, failing = fanout.jobs(["cpu", "cpu"], tmp_path, ["--rows", "9"])
    failing = Job(failing.name, (*failing.arguments, "--die-at", "3"))
    found = run_side_by_side([whole, failing], lambda line: None)
    assert found["gpu0"].is_done
    assert (found["gpu1"].returncode, found["gpu1"].reason) == (1, "exit code 1; lost the CUDA context")
    assert (len(keys(tmp_path / "gpu0")), len(keys(tmp_path / "gpu1"))) == (9, 4)
    again = run_side_by_side(fanout.jobs(["cpu", "cpu"], tmp_path, ["--rows", "9"]), lambda line: None)
    assert [outcome.parts["kernels"] for outcome in again.values()] == ["0 measured", "5 measured"]
    assert len(set(keys(tmp_path / "gpu1"))) == len(keys(tmp_path / "gpu1")) == 9


def test_a_process_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    folder = tmp_path / "gpu0"
    [job] = fanout.jobs(["cpu"], tmp_path, ["--rows", "4000"])
    killer = subprocess.Popen([sys.executable, "-c", KILLER, str(folder / LOCK), str(folder / records.MEASUREMENTS)])
    found = run_side_by_side([job], lambda line: None)
    assert killer.wait() == 0
    assert "killed by SIGKILL" in found["gpu0"].reason
    assert 3 <= len(keys(folder)) < 400


KILLER = """
import os, signal, sys, time
from pathlib import Path
lock, rows = map(Path, sys.argv[1:])
while not rows.is_file() or rows.read_bytes().count(b"\\n") < 3:
    time.sleep(0.01)
os.kill(int(lock.read_text().split()[1]), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_kill_9_of_the_parent_ends_all_and_a_re_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    folders = [tmp_path / "gpu0", tmp_path / "gpu1"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, SLOW_BENCH, str(tmp_path)])
    try:
        wait_until(lambda: all(rows_in(folder) >= 3 for folder in folders))
        children = [int((folder / LOCK).read_text().split()[1]) for folder in folders]
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: all(is_gone(child) for child in children))
    left = [len(keys(folder)) for folder in folders]
    assert max(left) < 400
    found = run_side_by_side(fanout.jobs(["cpu", "cpu"], tmp_path, ["--rows", str(max(left))]), lambda line: None)
    assert [outcome.parts["kernels"] for outcome in found.values()] == [f"{max(left) - n} measured" for n in left]


def is_gone(process: int) -> bool:
    """Ended, or a zombie that nobody here can wait for."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_an_interrupted_parent_stops_its_children(tmp_path: Path) -> None:
    """Ctrl-C in a script that shares no terminal with them."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, SLOW_BENCH, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: all(rows_in(tmp_path / name) >= 3 for name in ("gpu0", "gpu1")))
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=20) != 0
    finally:
        parent.kill()
        parent.wait()
    for name in ("gpu0", "gpu1"):
        assert not records.read(tmp_path / name).warnings
        os.close(lock_folder(tmp_path / name))  # nobody holds it any more


def test_output_that_is_no_json_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "COMMAND", (sys.executable, "-c", "print('hello')"))
    found = run_side_by_side([Job("gpu0", ())], lambda line: None)
    assert (found["gpu0"].returncode, found["gpu0"].parts) == (0, {})
    assert json.dumps(found["gpu0"].__dict__)


@pytest.mark.parametrize("printed", ["", "busy\n", "[]", '{"parts": null}', '{"parts": {"kernels": 7}}', "[" * 10**5])
def test_what_is_no_answer_of_a_bench_has_no_parts(printed: str) -> None:
    assert fanout._parts(printed) == {}
    assert fanout._parts('{"out": "x", "parts": {"kernels": "7 measured"}}') == {"kernels": "7 measured"}
