"""Measurement files: what survives a kill, a full disk, a second process, another machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.decode import decode
from flopcast.errors import DataError, RunError, UsageError
from flopcast.kernels.shapes import (
    AdamW,
    Attention,
    Call,
    CrossEntropy,
    Gemm,
    Operand,
    RmsNorm,
    RopeQkNorm,
    SwiGlu,
    shape_to_json,
)
from flopcast.microbench.records import recorder, records, rows
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.row_shapes import Shape

MACHINE = {"schema": 1, "machine": "aaaa", "device": {"type": "cuda"}, "host": {}, "stack": {}}


def row(key: str = "gemm/1", **fields: Any) -> dict[str, Any]:
    return {"key": key, "backend": "torch", "cache": "cold", "status": "ok", **fields}


def write(folder: Path, *keys: str) -> Path:
    with Recorder(folder, MACHINE) as recorder:
        for key in keys:
            recorder.append(row(key))
    return folder / records.MEASUREMENTS


def test_rows_come_back_and_are_done(tmp_path: Path) -> None:
    path = write(tmp_path / "new" / "folder", "a", "b")
    found = records.read(path)
    assert [r["key"] for r in found.rows] == ["a", "b"]
    assert not found.warnings
    assert {"schema": 1, "machine": "aaaa", "method": rows.METHOD}.items() <= found.rows[0].items()
    with Recorder(path.parent, MACHINE) as recorder:
        assert recorder.is_done("a")
        assert not recorder.is_done("a", backend="triton")
        assert not recorder.is_done("a", cache="hot")
        assert not recorder.is_done("c")


def test_out_of_memory_rows_are_retried_only_when_asked_and_the_last_row_counts(tmp_path: Path) -> None:
    with Recorder(tmp_path, MACHINE) as recorder:
        recorder.append(row("a", status="oom"))
        assert recorder.is_done("a")
        assert not recorder.is_done("a", retry=("oom",))
        recorder.append(row("a", status="ok"))
        assert recorder.is_done("a", retry=("oom",))
    assert [r["status"] for r in records.read(tmp_path).latest()] == ["ok"]


def test_tiny_models_of_two_runs_of_steps_are_two_draws_of_the_host(tmp_path: Path) -> None:
    """Three runs of steps lie in one file of an H100, and its host was fitted to the last of them alone."""
    with Recorder(tmp_path, MACHINE) as recorder:
        for session in ("one", "two"):
            recorder.append(row("host/qwen3/depth2/forward", value=1.0, session=session))
            recorder.append(row("a", session=session))
    found = [(r["key"], r.get("session")) for r in records.read(tmp_path).latest()]
    tiny = "host/qwen3/depth2/forward"
    assert sorted(found) == [("a", "two"), (tiny, "one"), (tiny, "two")]


def test_a_row_that_is_not_json_is_refused_before_it_reaches_the_file(tmp_path: Path) -> None:
    with Recorder(tmp_path, MACHINE) as recorder, pytest.raises(ValueError, match="JSON"):
        recorder.append(row("a", seconds=float("nan")))
    assert records.read(tmp_path).rows == []


@given(cut=st.integers(min_value=1, max_value=400))
def test_a_file_cut_anywhere_loses_the_torn_line_only(cut: int) -> None:
    lines = [recorder.encode({"schema": 1, **row(f"k{i}"), "machine": "aaaa", "method": 1}) for i in range(4)]
    data = b"".join(lines)[:cut]
    found = records.parse(data, Path("m.jsonl"))
    whole = data.count(b"\n")
    assert len(found.rows) in (whole, whole + 1)  # all of a row but its newline is a row
    assert (found.torn_at is not None) == bool(found.warnings)
    if found.torn_at is not None:
        assert data[found.torn_at - 1 : found.torn_at] in (b"", b"\n")
        assert "torn" in found.warnings[0]


def test_a_torn_last_line_is_reported_dropped_and_written_again(tmp_path: Path) -> None:
    path = write(tmp_path, "a", "b")
    path.write_bytes(path.read_bytes()[:-20])
    assert "line 2" in records.read(path).warnings[0]
    with Recorder(tmp_path, MACHINE) as recorder:
        assert "torn" in recorder.warnings[0]
        assert not recorder.is_done("b")
        recorder.append(row("b"))
    assert [r["key"] for r in records.read(path).rows] == ["a", "b"]
    assert not records.read(path).warnings


def test_a_lost_final_newline_is_put_back(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    path.write_bytes(path.read_bytes()[:-1])
    with Recorder(tmp_path, MACHINE) as recorder:
        recorder.append(row("b"))
    assert [r["key"] for r in records.read(path).rows] == ["a", "b"]


WHOLE = {"schema": 1, "key": "scalar/x", "status": "ok", "machine": "aaaa", "method": 1, "value": 1.0}
CALL = {
    "kind": "call", "op": "aten.add.Tensor", "outputs": [], "args": "[]",
    "inputs": [{"shape": [4, 2], "stride": [2, 1], "dtype": "bf16"}],
}  # fmt: skip


def spoilt(**fields: Any) -> bytes:
    return json.dumps({**WHOLE, **fields}).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "line 2: not JSON"),
        (b"[1]", "line 2: is a list of 1: valid is an object"),
        (b'{"a":1}', "line 2: status is missing"),
        (b"\xff\xfe", "line 2: byte 0 is not UTF-8"),
        (b"[" * 100_000, "line 2: it is nested too deeply"),
        (spoilt(status="fine"), "status is 'fine': valid is one of ok, oom"),
        (spoilt(value=None), "value is missing, in a row of status ok"),
        (spoilt(value=-1.0), "value is -1.0: valid is a number of 0 or more"),
        (spoilt(value=1e400), "Infinity is not JSON"),
        (spoilt(seconds="1"), "seconds is '1': valid is a number above 0"),
        (spoilt(samples=[1.0, None]), r"samples\[1\] is None"),
        (spoilt(kernels=[["k", 1.0], ["k"]]), r"kernels\[1\] is a list of 1: valid is a list of 2"),
        (spoilt(clock_mhz=0), "clock_mhz is 0"),
        (spoilt(throttled=1), "throttled is 1: valid is true or false"),
        (spoilt(key="a/b", shape={"kind": "gemm", "m": 0, "n": 1, "k": 1}), "shape.m is 0: valid is an integer"),
        (spoilt(key="a/b", shape={"kind": "gemm", "m": 1, "n": 1}), "shape.k is missing"),
        (spoilt(key="a/b", shape={"kind": "magic"}), "shape.kind is 'magic'"),
        (spoilt(key="a/b", shape={**CALL, "args": "{}"}), "shape.args is '{}'"),
        (spoilt(key="a/b", shape={**CALL, "written": [1]}), "shape is .*valid is a call that writes inputs of its own"),
        (
            spoilt(key="a/b", shape={**CALL, "inputs": [{"shape": [4], "stride": [2, 1], "dtype": "bf16"}]}),
            r"shape.inputs\[0\] is an object of 3 fields: valid is as many sizes as strides",
        ),
        (
            spoilt(key="a/b", shape={**CALL, "outputs": [{"shape": [True], "stride": [1], "dtype": "bf16"}]}),
            r"shape.outputs\[0\].shape\[0\] is True",
        ),
        (spoilt(key="step/x"), "plan is missing"),
        (spoilt(key="step/x", plan={"name": "x", "config": {}, "batch": 0}), "plan.batch is 0"),
        (spoilt(key="step/x", plan={"name": "x", "config": {}}), "host_seconds is missing"),
        (spoilt(key="step_kernels/x", plan={"name": "x", "config": {}}, device_seconds=1, n_kernels=1, ops={"a": [1]}),
         "ops.a is a list of 1: valid is a list of 2"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_left_out_with_its_line_and_reason(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path, "a", "b")
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, line, second, b""]))
    with Recorder(tmp_path, MACHINE) as recorder:
        for found in (records.read(path), recorder):
            assert [r["key"] for r in found.rows] == ["a", "b"]
            (warning,) = found.warnings
            assert warning.startswith(f"{path}: 1 of 3 rows are wrong and left out: line 2: ")
            assert re.search(message, warning)
            assert len(warning) < 400 + len(str(path))


def test_the_first_few_of_many_wrong_rows_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    path.write_bytes(path.read_bytes() + b"[]\n" * 9)
    (warning,) = records.read(path).warnings
    assert "9 of 10 rows" in warning
    assert warning.count("line ") == 3
    assert warning.endswith("; and 6 more")


def test_rows_of_a_newer_schema_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    path.write_bytes(path.read_bytes() + spoilt(schema=2) + b"\n")
    with pytest.raises(DataError, match=r"line 2: schema 2 is newer.*upgrade"):
        records.read(path)


@pytest.mark.parametrize("shape", [
    Gemm(m=1, n=2, k=3), Attention(batch=1, heads=2, kv_heads=1, seq=4, head_dim=8), RmsNorm(rows=1, n=2),
    RopeQkNorm(batch=1, seq=2, heads=2, kv_heads=1, head_dim=8), SwiGlu(numel=3), CrossEntropy(rows=2), AdamW(numel=4),
    Call("aten.add.Tensor", (Operand((2, 0), (0, 1), "fp32"),), (), '[{"t":0},1]', '{"alpha":2}', (0,)),
])  # fmt: skip
def test_every_kind_of_shape_is_right(shape: Any) -> None:
    kept = json.loads(json.dumps(shape_to_json(shape)))
    assert decode(Shape, kept, "a.json") is kept


@pytest.mark.parametrize("content", [b"name,seconds\na,1\n", b"hello", b'{"some":"json"}\n', b"\x00\x01"])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / records.MEASUREMENTS
    path.write_bytes(content)
    with pytest.raises(DataError, match="is it a measurement file"):
        Recorder(tmp_path, MACHINE)
    assert path.read_bytes() == content


def test_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="flopcast bench"):
        records.read(tmp_path)
    with pytest.raises(DataError, match="flopcast bench"):
        records.read_machine(tmp_path)


def test_another_machine_is_refused_by_name_with_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    other = {**MACHINE, "machine": "bbbb"}
    with pytest.raises(UsageError, match=r"aaaa.*bbbb.*--out"):
        Recorder(tmp_path, other)
    (tmp_path / records.MACHINE).unlink()  # the rows themselves say it too
    with pytest.raises(UsageError, match=r"aaaa.*bbbb.*--out"):
        Recorder(tmp_path, other)
    assert len(records.read(path).rows) == 1


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema":9,"machine":"aaaa"}'])
def test_a_bad_machine_file_is_a_data_error(tmp_path: Path, text: str) -> None:
    (tmp_path / records.MACHINE).write_text(text)
    with pytest.raises(DataError, match="machine"):
        Recorder(tmp_path, MACHINE)


def test_a_second_recorder_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    with Recorder(tmp_path, MACHINE), pytest.raises(UsageError, match=rf"another process \(pid {os.getpid()}\)"):
        Recorder(tmp_path, MACHINE)
    Recorder(tmp_path, MACHINE).close()


def test_a_refused_folder_is_not_left_locked(tmp_path: Path) -> None:
    write(tmp_path, "a")
    with pytest.raises(UsageError):
        Recorder(tmp_path, {**MACHINE, "machine": "bbbb"})
    Recorder(tmp_path, MACHINE).close()


def test_an_unwritable_folder_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="--out"):
        Recorder(file, MACHINE)
    with pytest.raises(UsageError, match="--out"):
        Recorder("/proc/flopcast", MACHINE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_disk_is_a_clear_error() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(RunError, match=r"no room.*No space left.*run the same command again"):
        recorder.write_line(descriptor, b"{}\n", "measurements.jsonl")
    os.close(descriptor)


LIMITED = """
import resource, sys
from flopcast.errors import RunError
from flopcast.microbench.records.recorder import Recorder
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # a disk that fills in the midst of a line
recorder = Recorder(sys.argv[1], {"schema": 1, "machine": "aaaa", "device": {"type": "cuda"}, "stack": {}})
try:
    for i in range(100):
        recorder.append({"key": f"k{i}", "status": "ok"})
except RunError as error:
    print(i, error)
"""


def test_a_disk_that_fills_midway_keeps_every_finished_row(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True)
    finished, message = done.stdout.split(" ", 1)
    assert "no room" in message
    found = records.read(tmp_path)
    assert len(found.rows) == int(finished) > 5
    assert not found.warnings  # the part of a line that fitted was taken back


def test_every_line_on_disk_is_a_json_object(tmp_path: Path) -> None:
    path = write(tmp_path, "a\nb", "c\u2028d")
    assert [json.loads(line)["key"] for line in path.read_text().split("\n")[:-1]] == ["a\nb", "c\u2028d"]
