"""bench, fit, predict and validate on this machine's processor: real kernels, real steps, real processes.

The suite is cut down to seconds; everything else is what `flopcast bench --device cpu` runs.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records import records
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import Identity, identity
from flopcast.microbench.steps import run as run_steps
from flopcast.roofline.cli import app
from flopcast.roofline.gpu.library import profiles
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.validation import run, step_plans

# Every 11th case of the shipped suite, a tenth of the time for each, no copies of up to 1 GiB, and bandwidths by arrays
# of 16 MiB.
BRIEFLY = """
import sys
from dataclasses import replace
from flopcast.microbench.sweep import ceilings, scalars
from flopcast.microbench.timing.policy import CPU_QUICK, POLICIES
from flopcast.roofline.cli import app
from flopcast.roofline.gpu.fit import host_calibration
from flopcast.roofline.gpu import suites

load, plan, measures = suites.load, host_calibration.host_plan, scalars.scalar_measures
scalars.scalar_measures = lambda *a: {k: m for k, m in measures(*a).items() if not k.startswith("scalar/copy/")}
ceilings.BANDWIDTH_BYTES["cpu"] = 1 << 24
suites.load = lambda name: load(name)[::11]
host_calibration.host_plan = lambda kind: replace(plan(kind), rounds=1, steps_per_round=1)
POLICIES["cpu"]["quick"] = replace(
    CPU_QUICK, min_samples=2, timeout_seconds=0.01, warm_up_seconds=0.01, sustained_seconds=0.1,
    max_rotation_bytes=1 << 24, max_sets=4, scalar_repeats=2,
)
words = sys.argv[1:]
while words:  # commands one after the other
    end = words.index("THEN") if "THEN" in words else len(words)
    given, words = words[:end], words[end + 1 :]
    sys.argv = ["flopcast", *given]
    try:
        app.main()
    except SystemExit as left:
        if left.code:
            raise
"""

RUN: dict[str, Any] = {"width": 64, "depth": 2, "vocab": 4096}  # the width that the suite measures
RUN_OPTIONS = [word for name, value in RUN.items() for word in (f"--{name}", str(value))]
ONCE = ("--batch", "1", "--seq", "128")


Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_profiles_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "user_folder", lambda: tmp_path / "profiles")


def start(*arguments: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BRIEFLY, *map(str, arguments)], cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def identities(folder: Path) -> list[Identity]:
    return [identity(row) for row in records.read(folder).rows]


@dataclass(frozen=True)
class Bench:
    """A bench that was killed, and resumed to its end."""

    folder: Path
    left_by_the_killed: bytes
    document: dict[str, Any]
    remarks: str


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench") / "new"
    file = folder / records.MEASUREMENTS
    killed = start("bench", "--device", "cpu", "--out", folder)
    try:
        deadline = time.monotonic() + 300  # of a machine that is busy with other tests
        while not file.is_file() or file.read_bytes().count(b"\n") < 24:
            assert killed.poll() is None, killed.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        killed.send_signal(signal.SIGKILL)
    finally:
        killed.kill()
        killed.communicate()
    whole = file.read_bytes()[: file.read_bytes().rfind(b"\n") + 1]
    with file.open("ab") as left:  # what a kill in the middle of a write leaves
        left.truncate(len(whole))
        left.write(b'{"schema":1,"key":"torn')
    resumed = start("bench", "--device", "cpu", "--out", folder, "--json")
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    return Bench(folder, whole, json.loads(out), err)


@pytest.fixture
def measured(bench: Bench, tmp_path: Path) -> Path:
    """A copy of the bench's folder, to be spoilt."""
    return Path(shutil.copytree(bench.folder, tmp_path / "measured"))


# --- bench --------------------------------------------------------------------------------------------------


def test_a_killed_bench_goes_on_where_it_was(bench: Bench) -> None:
    now = (bench.folder / records.MEASUREMENTS).read_bytes()
    assert now.startswith(bench.left_by_the_killed), "rows that were done are left as they are"
    assert len(now) > len(bench.left_by_the_killed)
    done = identities(bench.folder)
    assert len(done) == len(set(done)), "nothing is measured twice"
    assert b'"key":"torn' not in now
    assert records.read(bench.folder).warnings == []


def test_bench_says_what_it_did(bench: Bench) -> None:
    assert bench.document["out"] == str(bench.folder)
    parts = bench.document["parts"]
    assert [name.split()[0] for name in parts] == ["host", "ceilings", "kernels"]
    assert all(part in bench.remarks for part in parts)


def test_bench_covers_host_ceilings_and_kernels(bench: Bench) -> None:
    rows = records.read(bench.folder).latest()
    prefixes = {row["key"].split("/")[0] for row in rows}
    assert {"host", "scalar", "gemm", "attention"} <= prefixes
    assert {row["status"] for row in rows} == {"ok"}
    assert records.read_machine(bench.folder)["device"]["type"] == "cpu"


def test_a_bench_without_time_for_the_sweep_says_what_is_left(measured: Path) -> None:
    file = measured / records.MEASUREMENTS
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"key":"gemm' not in line))
    done = start("bench", "--device", "cpu", "--out", measured, "--budget", "0", "--json")
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert "left over" in json.loads(out)["parts"]["kernels"]
    assert "gemm" not in file.read_text()


def test_a_folder_of_another_machine_is_not_added_to(flopcast: Command, measured: Path) -> None:
    machine = json.loads((measured / records.MACHINE).read_text())
    (measured / records.MACHINE).write_text(json.dumps({**machine, "machine": "another"}))
    before = (measured / records.MEASUREMENTS).read_bytes()
    result = flopcast("bench", "--device", "cpu", "--out", measured)
    assert (result.code, result.out) == (2, "")
    assert "another" in result.err
    assert "--out" in result.err
    assert (measured / records.MEASUREMENTS).read_bytes() == before


# --- bench --config -----------------------------------------------------------------------------------------


FACTORY = """
import torch

def tiny(batch=8):
    return torch.nn.Linear(64, 64), torch.randn(batch, 64), torch.sum
"""


def test_models_asked_for_are_held_directly(flopcast: Command, measured: Path, tmp_path: Path) -> None:
    """A config and a factory, added to the suite's rows: nothing twice, all of the steps measured."""
    file, config = measured / records.MEASUREMENTS, tmp_path / "asked.json"
    config.write_text(json.dumps(make_config(**RUN)))
    before = file.read_bytes()
    (tmp_path / "mine.py").write_text(FACTORY)
    done = start(
        "bench", "--device", "cpu", "--config", config, *ONCE, "--out", measured, "--json", "THEN",
        "bench", "--device", "cpu", "--module", "mine:tiny", "--batch", "32", "--out", measured, cwd=tmp_path,
    )  # fmt: skip
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    parts = json.JSONDecoder().raw_decode(out)[0]["parts"]
    assert "0 measured" in parts["ceilings"], "the suite's are used"
    assert "done before" in parts["kernels"]
    found = identities(measured)
    assert len(found) == len(set(found))
    assert file.read_bytes().startswith(before)
    fitted = flopcast("fit", measured, "--json")
    assert fitted.code == 0, fitted.err
    sources = fitted.document["sources"]
    assert [source["source"] for source in sources] == ["asked 1x128", "tiny 32"]
    everything = {"measured": pytest.approx(1.0), "interpolated": 0.0, "extrapolated": 0.0}
    assert [source["basis_shares"] for source in sources] == [everything, everything]
    assert fitted.document["shapes"] > 150
    step = flopcast("predict", "--gpu", fitted.document["profile"], "--config", config, *ONCE, "--json")
    assert step.document["basis_shares"] == pytest.approx(sources[0]["basis_shares"])


def test_predict_says_how_its_device_time_came_about(flopcast: Command) -> None:
    shown = flopcast("predict", "--gpu", "nvidia-h200", "--config", "qwen3-0.6b")
    assert "device time by basis" in shown.out
    assert "interpolated" in shown.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", "8"), "--batch without a model"),
        (("--suite", "quick", "--config", "qwen3-0.6b"), "--suite and a model are two sweeps"),
        (("--config", "no-such-model"), "unknown config 'no-such-model'"),
        (("--config", "qwen3-0.6b", "--optimizer", "lion"), "optimizer 'lion': valid are"),
        (("--suite", "huge"), "valid are quick, standard, full"),
    ],
)
def test_a_bench_that_cannot_be(flopcast: Command, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = flopcast("bench", "--device", "cpu", "--out", tmp_path / "out", *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert not (tmp_path / "out").exists()


# --- fit ----------------------------------------------------------------------------------------------------


def test_measurements_become_a_profile_that_forecasts(flopcast: Command, measured: Path, tmp_path: Path) -> None:
    fitted = flopcast("fit", measured, "--out", tmp_path / "a" / "cpu.json", "--json")
    assert fitted.code == 0, fitted.err
    document = fitted.document
    assert (document["gpu"], document["profile"]) == ("cpu", str(tmp_path / "a" / "cpu.json"))
    assert document["n"] > 0
    assert document["classes"]
    step = flopcast("predict", "--gpu", document["profile"], *RUN_OPTIONS, *ONCE, "--json")
    assert step.code == 0, step.err
    found = step.document
    assert (found["gpu"], found["profile_basis"], found["depth"]) == ("cpu", "measured", 2)
    assert found["step_seconds"] >= found["device_seconds"] > 0
    assert found["price"] is None
    assert 1e-4 < found["step_seconds"] < 60
    # an operator runs when it is called: the step is both together
    assert found["step_seconds"] == pytest.approx(found["device_seconds"] + found["host_seconds"])
    kept = flopcast("predict", "--gpu", "cpu", *RUN_OPTIONS, *ONCE, "--json")
    assert kept.document == found
    assert [e["source"] for e in flopcast("gpus", "--json").document if e["name"] == "cpu"] == [
        str(tmp_path / "profiles" / "cpu.json.gz")
    ]


def test_a_fit_prints_its_errors_and_where_it_wrote(flopcast: Command, measured: Path) -> None:
    result = flopcast("fit", measured)
    assert result.code == 0
    assert "Errors of the fit" in result.out
    assert f"wrote {measured / 'profile.json.gz'}" in result.err
    assert Profile.load(measured / "profile.json.gz").gpu == "cpu"


def test_a_torn_last_line_is_tolerated_and_reported(flopcast: Command, measured: Path) -> None:
    file = measured / records.MEASUREMENTS
    file.write_bytes(file.read_bytes()[:-40])
    result = flopcast("fit", measured)
    assert result.code == 0, result.err
    assert "the last line is torn" in result.err
    assert str(file) in result.err


def test_a_spoilt_line_in_the_middle_is_left_out_and_told(flopcast: Command, measured: Path) -> None:
    file = measured / records.MEASUREMENTS
    lines = file.read_text().splitlines()
    lines[4] = lines[4][:50]
    file.write_text("\n".join(lines) + "\n")
    result = flopcast("fit", measured)
    assert result.code == 0
    assert "line 5: not JSON" in result.err
    assert (measured / "profile.json.gz").is_file()


def test_measurements_of_a_newer_flopcast_are_refused(flopcast: Command, measured: Path) -> None:
    file = measured / records.MEASUREMENTS
    file.write_text(file.read_text().replace('{"schema":1,', '{"schema":7,', 1))
    result = flopcast("fit", measured)
    assert (result.code, result.out) == (2, "")
    assert "schema 7 is newer" in result.err


def test_nothing_measured_is_nothing_to_fit(flopcast: Command, measured: Path) -> None:
    (measured / records.MEASUREMENTS).write_text("")
    result = flopcast("fit", measured)
    assert (result.code, result.out) == (2, "")
    assert "flopcast bench" in result.err


@pytest.mark.parametrize("out", ["plain/cpu.json", "/proc/no/cpu.json"])
def test_a_profile_that_cannot_be_written_is_named(
    flopcast: Command, measured: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(measured)
    Path("plain").write_text("")
    result = flopcast("fit", ".", "--out", out)
    assert (result.code, result.out) == (2, "")
    named = out if out.startswith("plain") else str(Path(out).parent)
    assert named in result.err
    assert "cannot be written" in result.err
    assert "--out" in result.err


def test_a_home_that_cannot_be_written_costs_the_name_alone(
    flopcast: Command, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (measured / "plain").write_text("")
    monkeypatch.setattr(profiles, "user_folder", lambda: measured / "plain" / "profiles")
    assert flopcast("fit", measured).code == 0
    assert (measured / "profile.json.gz").is_file()


# --- validate -----------------------------------------------------------------------------------------------

TINY = StepPlan(name="tiny", config=make_config(**RUN), batch=1, seq=64, group="cpu")
# Its embedding alone is 2.5 petabytes.
VAST = replace(TINY, name="vast", config={**make_config(**RUN), "vocab_size": 10**13})
ODD = replace(TINY, name="odd", config={**make_config(**RUN), "model_type": "no-such-model"})


@pytest.fixture(scope="module")
def fitted(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fit` makes of the bench, once for all that ask for no more than a profile."""
    folder = Path(shutil.copytree(bench.folder, tmp_path_factory.mktemp("fitted") / "measured"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "user_folder", lambda: folder / "profiles")
        patch.setattr(sys, "argv", ["flopcast", "fit", str(folder)])
        with pytest.raises(SystemExit) as left:
            app.main()
    assert not left.value.code
    return folder


@pytest.fixture
def profile(fitted: Path, measured: Path) -> Path:
    """The bench's profile, beside its measurements and in the user's folder, as `fit` leaves it."""
    shutil.copytree(fitted / "profiles", profiles.user_folder())
    return Path(shutil.copy(fitted / "profile.json.gz", measured))


@pytest.fixture
def a_ladder_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plans, "validation_plans", lambda *_, **__: [TINY])


def table_of(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "validation.csv").open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def test_real_steps_are_compared_and_what_cannot_run_keeps_its_row(
    flopcast: Command, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_plans, "validation_plans", lambda *_, **__: [VAST, ODD, TINY])
    out = tmp_path / "steps"
    result = flopcast("validate", "--device", "cpu", "--gpu", profile, "--out", out, "--json")
    assert result.code == 0, result.err
    assert [(row["name"], row["status"]) for row in result.document["rows"]] == [
        ("vast", "oom"),
        ("odd", "error"),
        ("tiny", "ok"),
    ]
    rows = table_of(out)
    assert list(rows) == ["vast", "odd", "tiny"]
    done = rows["tiny"]
    for part in ("step", "device"):
        measured, forecast = float(done[f"{part}_seconds"]), float(done[f"{part}_forecast"])
        assert float(done[f"{part}_error"]) == pytest.approx(forecast / measured - 1, abs=1e-3)
    assert (done["used_in_fit"], done["reason"]) == ("false", "")
    assert done["within_interval"] in ("true", "false")
    assert "memory" in rows["vast"]["reason"]
    assert "no-such-model" in rows["odd"]["reason"]
    for name in ("vast", "odd"):
        assert rows[name]["step_seconds"] == rows[name]["step_error"] == ""
    assert result.document["summary"][0]["n"] == 1


@pytest.mark.usefixtures("a_ladder_of_one")
def test_steps_are_run_once_and_compared_from_where_they_lie(
    flopcast: Command, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = flopcast("validate", "--device", "cpu")  # the profile that `fit` kept
    assert first.code == 0, first.err
    assert "Forecast against real steps" in first.out
    assert "wrote out/validate/validation.csv" in first.err
    steps = Path("out/validate")
    before = (steps / records.MEASUREMENTS).read_bytes()

    monkeypatch.setattr(run_steps, "measure_plan", lambda *a, **k: pytest.fail("a step was run again"))
    again = flopcast("validate", "--device", "cpu")
    assert again.code == 0
    assert (steps / records.MEASUREMENTS).read_bytes() == before

    (steps / "validation.csv").unlink()
    beside = flopcast("validate", "--steps-from", steps, "--gpu", profile)
    assert beside.out == again.out
    assert list(table_of(steps)) == ["tiny"]
    elsewhere = flopcast("validate", "--steps-from", steps, "--gpu", profile, "--out", "a/b", "--json")
    assert elsewhere.document["gpu"] == "cpu"
    assert table_of(Path("a/b")) == table_of(steps)
    assert os.listdir("a/b") == ["validation.csv"]
    (tmp_path / "plain").write_text("")
    blocked = flopcast("validate", "--steps-from", steps, "--gpu", profile, "--out", "plain/b")
    assert (blocked.code, blocked.out) == (2, "")
    assert "plain/b" in blocked.err


def test_the_profile_is_looked_for_before_a_step_is_run(
    flopcast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_validation_steps", lambda *a, **k: pytest.fail("steps were run"))
    for gpu in ((), ("--gpu", "h300"), ("--gpu", "nvidia-h200")):
        result = flopcast("validate", "--device", "cpu", "--out", tmp_path / "steps", *gpu)
        assert (result.code, result.out) == (2, "")
    assert not (tmp_path / "steps").exists()


@pytest.mark.usefixtures("a_ladder_of_one")
def test_steps_may_be_run_here_and_compared_elsewhere(flopcast: Command, profile: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    none = flopcast("validate", "--device", "cpu", "--run-only", "--budget", "0", "--out", steps)
    assert none.code == 0, none.err
    assert records.read(steps).rows == []
    ran = flopcast("validate", "--device", "cpu", "--run-only", "--out", steps)
    assert ran.code == 0, ran.err
    assert f"`flopcast validate --steps-from {steps}`" in ran.err
    assert not (steps / "validation.csv").exists()
    compared = flopcast("validate", "--steps-from", steps, "--gpu", profile, "--json")
    assert [row["name"] for row in compared.document["rows"]] == ["tiny"]
    for bad in (
        ("--budget", "-1"), ("--run-only", "--steps-from", str(steps)), ("--run-only", "--only-estimates"),
        ("--only-estimates",), ("--only-estimates", "--estimates-from", str(steps)),
    ):  # fmt: skip
        result = flopcast("validate", "--device", "cpu", "--out", steps, *bad)
        assert (result.code, result.out) == (2, ""), bad


def test_a_step_of_ones_own_is_run_and_compared(flopcast: Command, profile: Path, tmp_path: Path) -> None:
    config, steps = tmp_path / "mine.json", tmp_path / "steps"
    config.write_text(json.dumps(TINY.config))
    asked = ("validate", "--device", "cpu", "--out", steps, "--config", config, "--batch", "1", "--seq", "24")
    result = flopcast(*asked, "--optimizer", "sgd-momentum", "--gpu", profile, "--json")
    assert result.code == 0, result.err
    (row,) = result.document["rows"]
    assert (row["name"], row["group"], row["status"]) == ("mine", "own", "ok")
    assert (row["batch"], row["seq"], row["optimizer"]) == (1, 24, "sgd-momentum")
    assert float(table_of(steps)["mine"]["step_forecast"]) > 0
    before = (steps / records.MEASUREMENTS).read_bytes()
    again = flopcast(*asked, "--optimizer", "sgd-momentum", "--run-only")
    assert (again.code, (steps / records.MEASUREMENTS).read_bytes()) == (0, before)


OWN_FACTORY = """
import torch
def make(batch=8, seq=32):
    return torch.nn.Linear(48, 48), torch.randn(batch, seq, 48), lambda out: out.float().square().mean()
def step():
    model = torch.nn.Linear(8, 8)
    return lambda: model(torch.randn(2, 8)).sum().backward()
"""


def test_a_module_of_ones_own_is_run_and_is_imported_again_only_where_it_is_named(
    flopcast: Command, profile: Path, tmp_path: Path
) -> None:
    source, steps = tmp_path / "mine.py", tmp_path / "steps"
    source.write_text(OWN_FACTORY)
    module = ("--module", f"{source}:make")
    result = flopcast("validate", "--device", "cpu", "--gpu", profile, "--out", steps, *module, "--seq", "7", "--json")
    assert result.code == 0, result.err
    (row,) = result.document["rows"]
    assert (row["name"], row["batch"], row["seq"], row["status"]) == ("make", 8, 7, "ok")
    forecast = table_of(steps)["make"]["step_forecast"]
    again = ("validate", "--steps-from", steps, "--gpu", profile)
    assert flopcast(*again).code == 0
    assert "names the module" in table_of(steps)["make"]["reason"]
    assert flopcast(*again, *module).code == 0
    assert table_of(steps)["make"]["step_forecast"] == forecast != ""
    refused = flopcast("validate", "--device", "cpu", "--out", tmp_path / "no", "--module", f"{source}:step")
    assert (refused.code, refused.out) == (2, "")
    assert "a step function" in refused.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--batch", "8"), "--batch 8 without a model"),
        (("--module", "no-such.py:make"), "no-such.py does not exist"),
        (("--module", "flopcast.microbench.zoo:mlp", "--config", "gpt2"), "give one of the two"),
        (("--width", "256", "--suite", "quick"), "--suite quick with a model"),
        (("--width", "256", "--only-estimates"), "--only-estimates with a model"),
        (("--width", "256", "--matmul", "best"), "picks by a profile"),
        (("--width", "256", "--mode", "max-autotune"), "valid are eager, compile, compile-graphs"),
        (("--width", "256", "--seq", "0"), "seq is 0"),
        (("--config", "no-such"), "unknown config 'no-such'"),
    ],
)
def test_a_step_that_cannot_be_run_is_refused(
    flopcast: Command, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    result = flopcast("validate", "--device", "cpu", "--out", tmp_path / "steps", *options)
    assert (result.code, result.out) == (2, "")
    assert told in result.err
    assert not (tmp_path / "steps").exists()


@pytest.mark.usefixtures("a_ladder_of_one")
def test_estimates_of_another_run_stand_beside_the_steps(flopcast: Command, profile: Path, tmp_path: Path) -> None:
    """torch's estimates that failed where the steps ran are made again elsewhere, on the same kind of device."""
    steps, elsewhere = tmp_path / "steps", tmp_path / "estimates"
    ran = flopcast("validate", "--device", "cpu", "--run-only", "--out", steps)
    assert ran.code == 0, ran.err
    machine = records.read_machine(steps)
    failed = {
        "key": TINY.estimate_key,
        "plan": asdict(TINY),
        "backend": "torch",
        "cache": "cold",
        "shape": None,
        "value": None,
    }
    with Recorder(elsewhere, {**machine, "machine": "another"}) as recorder:
        recorder.append({**failed, "status": "error", "reason": "no encoding"})
    comparison = ("validate", "--steps-from", steps, "--gpu", profile, "--estimates-from", elsewhere, "--json")
    empty = flopcast(*comparison)
    assert (empty.code, empty.out) == (2, "")
    with Recorder(elsewhere, {**machine, "machine": "another"}) as recorder:
        recorder.append({**failed, "value": 0.5, "status": "ok"})
    (row,) = flopcast(*comparison).document["rows"]
    assert row["torch_forecast"] == 0.5
    assert row["torch_error"] == pytest.approx(0.5 / row["step_seconds"] - 1)
    shutil.copytree(elsewhere, steps / "estimates")  # found there without being named
    (row,) = flopcast(*comparison[:5], "--json").document["rows"]
    assert row["torch_forecast"] == 0.5
    machine["device"]["name"] = "another processor"
    (elsewhere / "machine.json").write_text(json.dumps({**machine, "machine": "another"}))
    other = flopcast(*comparison)
    assert (other.code, other.out) == (2, "")
    assert "another processor" in other.err


def test_another_stack_is_refused_unless_told(flopcast: Command, profile: Path, tmp_path: Path) -> None:
    """Steps of another torch than the profile's: their kernels are others."""
    import torch

    from flopcast.microbench.timing.device import describe

    steps, cpu = tmp_path / "steps", torch.device("cpu")
    with Recorder(steps, describe(cpu)) as recorder:
        failed = run_steps.measure_plan(replace(TINY, precision="fp8"), cpu, lambda step: {})
        recorder.append({**failed, "key": TINY.key})
    machine = json.loads((steps / "machine.json").read_text())
    machine["stack"]["torch"] = "2.9.1"
    (steps / "machine.json").write_text(json.dumps(machine))
    refused = flopcast("validate", "--steps-from", steps, "--gpu", profile)
    assert (refused.code, refused.out) == (2, "")
    assert "torch 2.9.1" in refused.err
    assert "--any-stack" in refused.err
    told = flopcast("validate", "--steps-from", steps, "--gpu", profile, "--any-stack", "--json")
    assert told.code == 0, told.err


# --- report -------------------------------------------------------------------------------------------------


def test_a_page_of_one_device_is_not_made_of_two(flopcast: Command, measured: Path, tmp_path: Path) -> None:
    """Measurements of this processor, real steps of an H200: refused before the fit."""
    steps = Path(__file__).resolve().parents[3] / "reports" / "nvidia-h200" / "steps"
    refused = flopcast("report", "--measurements", measured, "--steps", steps, "--out", tmp_path / "page")
    assert (refused.code, refused.out) == (2, "")
    assert "ran on NVIDIA H200" in refused.err
    assert "give those of one device" in refused.err
    assert not (tmp_path / "page").exists()
    same = flopcast("report", "--measurements", measured, "--gpu", "nvidia-h200", "--out", tmp_path / "page")
    assert same.code == 2
    assert "are of cpu" in same.err
