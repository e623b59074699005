"""Collectives among two real processes of this machine (gloo): checked, timed, resumed, fitted; and what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flopcast.errors import UsageError
from flopcast.microbench.collectives import launch
from flopcast.microbench.collectives.cases import KINDS
from flopcast.microbench.collectives.worker import Task
from flopcast.microbench.records import records
from flopcast.roofline.cli.app import app
from flopcast.roofline.cli.gpu.collectives import ON_PROCESSORS
from flopcast.roofline.gpu.links.profile import LinkProfile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ.setdefault(launch.THREADS, "1")  # the machine's name depends on it
    out = tmp_path_factory.mktemp("links") / "out"
    launch.run_here(Task(str(out), "gloo", "collectives", sizes=ON_PROCESSORS), 2)
    return out


def test_all_collectives_are_right_and_timed(folder: Path) -> None:
    rows = records.read(folder).rows
    assert {row["key"].split("/")[1] for row in rows} == set(KINDS)
    assert len(rows) == len(KINDS) * 2 * len(ON_PROCESSORS)
    for row in rows:
        assert row["status"] == "ok", row
        assert row["relative_error"] == 0.0
        assert row["seconds"] is not None
        assert row["seconds"] > 0
        assert len(row["samples"]) == row["n"] >= 5
        assert row["backend"] == "gloo"


def test_a_launchers_processes_add_what_is_missing_alone(folder: Path) -> None:
    """As under torchrun across hosts: the command is one of the processes, and the first of them speaks."""
    before = records.read(folder).rows
    lines = (folder / records.MEASUREMENTS).read_bytes().splitlines(keepends=True)
    (folder / records.MEASUREMENTS).write_bytes(b"".join(lines[:-2]) + lines[-2][:40])  # as a kill leaves it
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "flopcast", "bench",
        "--suite", "collectives", "--device", "cpu", "--out", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("collectives: measured 2 ok") == 1
    after = records.read(folder).rows
    assert [row["key"] for row in after] == [row["key"] for row in before]
    assert after[:-2] == before[:-2]


def test_other_settings_of_nccl_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first process; what it says is this one's error."""
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(UsageError, match="NCCL_ALGO"):
        launch.run_here(Task(str(folder), "gloo", "collectives", sizes=ON_PROCESSORS), 1)


def test_the_folder_is_fitted_to_a_link(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    done = CliRunner().invoke(app, ["fit", str(folder), "--out", str(path), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    profile = LinkProfile.load(path)
    assert told["points"] == len(profile.points) == len(KINDS) * 2 * len(ON_PROCESSORS)
    assert (profile.gpu, profile.backend, profile.nccl) == ("cpu", "gloo", "")
    assert {rate["basis"] for rate in told["rates"]} == {"measured", "extrapolated"}
    with pytest.raises(UsageError, match="--repeat"):
        CliRunner().invoke(app, ["fit", str(folder), "--repeat", str(folder)], catch_exceptions=False)


def test_a_folder_of_collectives_takes_no_kernels_and_the_reverse(folder: Path) -> None:
    with pytest.raises(UsageError, match="measurements of collectives"):
        CliRunner().invoke(app, ["bench", "--device", "cpu", "--out", str(folder)], catch_exceptions=False)
    other = folder.parent / "kernels"
    other.mkdir()
    first = (folder / records.MEASUREMENTS).read_text().splitlines()[0]
    key = records.read(folder).rows[0]["key"]
    (other / records.MEASUREMENTS).write_text(first.replace(key, "scalar/launch") + "\n")
    command = ["bench", "--suite", "collectives", "--device", "cpu", "--out", str(other)]
    with pytest.raises(UsageError, match="measurements of kernels"):
        CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [("--device cuda:1", "cuda, all GPUs"), ("--all-gpus", "--all-gpus"), ("--backend torch", "--backend"),
     ("--config qwen3-0.6b", "two sweeps"), ("--device cpu --budget -1", "0 or more")],
)  # fmt: skip
def test_options_that_do_not_go_with_it_are_refused(arguments: str, told: str, tmp_path: Path) -> None:
    command = ["bench", "--suite", "collectives", "--out", str(tmp_path / "out"), *arguments.split()]
    with pytest.raises(UsageError, match=told):
        CliRunner().invoke(app, command, catch_exceptions=False)
