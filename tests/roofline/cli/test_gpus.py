"""bench --all-gpus, fit of several cards, hosts and repeats, on this machine's processor: real processes, real kernels.

Two "GPUs" are the processor twice, measured side by side; the suite is cut down to seconds, all else is as it is run.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flopcast.microbench.records import records
from flopcast.microbench.records.recorder import lock_folder
from flopcast.roofline.gpu.library import profiles
from flopcast.roofline.gpu.profile.profile import Profile

# Every 17th case of the shipped suite, few ceilings, one round of the host's tiny models.
BRIEFLY = """
import sys
from dataclasses import replace
from flopcast.microbench import fanout
from flopcast.microbench.sweep import scalars
from flopcast.microbench.timing import device
from flopcast.microbench.timing.policy import CPU_QUICK, POLICIES
from flopcast.roofline.cli import app
from flopcast.roofline.gpu.fit import host_calibration
from flopcast.roofline.gpu import suites

load, plan, ceilings = suites.load, host_calibration.host_plan, scalars.scalar_measures
kept = ("launch", "matrix_burst", "hbm_copy", "kernel_floor")
scalars.scalar_measures = lambda *a: {k: m for k, m in ceilings(*a).items() if k.split("/")[1].startswith(kept)}
suites.load = lambda name: load(name)[::17]
host_calibration.host_plan = lambda kind: replace(plan(kind), rounds=1, steps_per_round=2)
POLICIES["cpu"]["quick"] = replace(
    CPU_QUICK, min_samples=2, timeout_seconds=0.01, warm_up_seconds=0.01, max_rotation_bytes=1 << 24,
    scalar_repeats=2,
)
device.all_gpus = lambda: ["cpu", "cpu"]
fanout.COMMAND = (sys.executable, "-c", sys.argv.pop(1))
app.main()
"""
RUN = ("--width", "64", "--depth", "2", "--vocab", "4096", "--batch", "1", "--seq", "128")


Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_profiles_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "user_folder", lambda: tmp_path / "profiles")


def briefly(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = BRIEFLY.replace("sys.argv.pop(1)", "CHILD")
    program = f"CHILD = {BRIEFLY!r}.replace('sys.argv.pop(1)', 'None')\n{script}"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@dataclass(frozen=True)
class Bench:
    folder: Path
    code: int
    document: Any
    err: str


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("cards") / "out"
    done = briefly("bench", "--all-gpus", "--out", folder, "--json")
    return Bench(folder, done.returncode, json.loads(done.stdout or "null"), done.stderr)


def keys(folder: Path) -> list[str]:
    return [row["key"] for row in records.read(folder).rows]


def test_each_gpu_is_measured_into_a_folder_of_its_own_and_the_host_once(both: Bench) -> None:
    assert both.code == 0, both.err
    found = both.document
    assert set(found["parts"]) == {"gpu0", "gpu1"}
    assert (found["failed"], found["out"]) == ({}, str(both.folder))
    first, second = (keys(both.folder / name) for name in ("gpu0", "gpu1"))
    host = [key for key in first if key.startswith("host/")]
    assert len(host) == 12
    assert first[: len(host)] == host, "the host is calibrated before anything else runs"
    assert sorted(set(first) - set(host)) == sorted(second)
    assert len(first) == len(set(first))
    assert any(part.startswith("host") for part in found["parts"]["gpu0"])
    assert both.err.index("gpu0: host") < both.err.index("gpu1: ")
    assert {"gpu0", "gpu1"} == set(found["spread"]["cards"])


def test_fit_takes_the_median_card_and_names_the_slowest(flopcast: Command, both: Bench, tmp_path: Path) -> None:
    fitted = flopcast("fit", both.folder, "--out", tmp_path / "median.json")
    assert fitted.code == 0, fitted.err
    profile = Profile.load(tmp_path / "median.json")
    gpus = profile.provenance["gpus"]
    assert gpus == both.document["spread"]
    assert gpus["slowest"] in ("gpu0", "gpu1")
    assert gpus["slowest_factor"] >= 1.0
    assert "2 cards, row by row" in fitted.out
    for op_class in gpus["classes"]:
        assert op_class in fitted.out
    assert profile.host is not None
    assert profile.host.layers["depths"] == [2, 4]


def test_a_folder_is_of_one_gpu_or_of_several(flopcast: Command, both: Bench, tmp_path: Path) -> None:
    one = flopcast("bench", "--device", "cpu", "--out", both.folder)
    assert (one.code, one.out) == (2, "")
    assert "--all-gpus" in one.err
    kept = tmp_path / "kept"
    shutil.copytree(both.folder / "gpu0", kept)
    several = flopcast("bench", "--all-gpus", "--out", kept)
    assert (several.code, several.out) == (2, "")
    assert "give another --out" in several.err


def test_a_second_process_on_the_folder_is_refused(
    flopcast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopcast.microbench.timing.device.all_gpus", lambda: ["cpu", "cpu"])
    lock = lock_folder(tmp_path)
    result = flopcast("bench", "--all-gpus", "--out", tmp_path)
    os.close(lock)
    assert (result.code, result.out) == (2, "")
    assert f"{tmp_path} is being written by another process" in result.err
    assert not (tmp_path / "gpu0").exists()


def test_all_gpus_is_for_gpus(flopcast: Command, tmp_path: Path) -> None:
    for arguments, said in (
        (("--device", "cpu"), "one GPU or all of them"),
        (("--suite", "vast"), "valid are quick"),
        (("--budget", "-1"), "seconds, 0 or more"),
    ):
        result = flopcast("bench", "--all-gpus", "--out", tmp_path / "out", *arguments)
        assert (result.code, result.out) == (2, "")
        assert said in result.err
    import torch

    if not torch.cuda.is_available():
        result = flopcast("bench", "--all-gpus", "--out", tmp_path / "out")
        assert result.code == 2
        assert "--device cpu" in result.err
    assert not (tmp_path / "out").exists()


def test_two_runs_are_compared_beside_the_fit(flopcast: Command, both: Bench, tmp_path: Path) -> None:
    runs = [shutil.copytree(both.folder / name, tmp_path / name) for name in ("gpu0", "gpu1")]
    result = flopcast("fit", runs[0], "--repeat", runs[1], "--json")
    assert result.code == 0, result.err
    agreements = result.document["repeatability"]["agreements"]
    assert {"all", "gemm", "scalars"} <= {one["group"] for one in agreements}
    with (tmp_path / "gpu0" / "repeatability.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    shaped = [row for row in records.read(runs[0]).rows if row.get("shape")]
    assert len([row for row in rows if row["class"] != "scalar"]) == len(shaped)


def test_a_fit_leaves_the_host_in_a_file_of_its_own(flopcast: Command, both: Bench, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(both.folder / "gpu0", tmp_path / "gpu0"))
    fitted = flopcast("fit", folder, "--json")
    assert fitted.code == 0, fitted.err
    host_file = Path(fitted.document["host_file"])
    assert host_file == folder / "host.json"
    host = json.loads(host_file.read_text())
    assert (host["kind"], host["name"]) == ("host", fitted.document["host"])
    assert set(host["layers"]) >= {"forward", "backward", "optimizer", "step"}
    assert host["stack"] == records.read_machine(folder)["stack"]
    named = flopcast("predict", "--gpu", folder / "profile.json.gz", *RUN, "--host", host_file, "--json")
    own = flopcast("predict", "--gpu", folder / "profile.json.gz", *RUN, "--json")
    assert named.document == own.document


def test_a_folder_of_the_host_alone_becomes_a_host(flopcast: Command, both: Bench, tmp_path: Path) -> None:
    """What `bench --suite host` leaves: the first process of --all-gpus was one."""
    file = tmp_path / "host" / records.MEASUREMENTS
    shutil.copytree(both.folder / "gpu0", file.parent)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"suite":"host"' in line))
    assert {key.split("/")[0] for key in keys(file.parent)} == {"host", "scalar"}
    shown = flopcast("fit", file.parent)
    assert shown.code == 0, shown.err
    assert "ms per layer" in shown.out
    assert (file.parent / "host.json").is_file()
    assert not (file.parent / "profile.json.gz").exists()
    document = flopcast("fit", file.parent, "--out", tmp_path / "mine.json", "--json").document
    assert (document["profile"], document["host_file"]) == (None, str(tmp_path / "mine.json"))
    assert flopcast("predict", "--gpu", "nvidia-h200", *RUN, "--host", tmp_path / "mine.json").code == 0
