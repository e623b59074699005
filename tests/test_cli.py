"""The command line as scripts and people meet it: exit codes, streams, messages, and the contract of its output."""

from __future__ import annotations

import csv
import functools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import RunError
from flopcast.roofline import cli, lookup
from flopcast.roofline.batch import SWEEP_OUT
from flopcast.roofline.models import load_config
from flopcast.roofline.profile import PROFILES, Profile

H200 = "nvidia-h200"
SHIPPED = (H200, "nvidia-l4", "nvidia-b200")
# A step whose stream ships, so that no test but those of other shapes traces one.
PREDICT = ("predict", "--gpu", H200, "--width", "512")


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@dataclass(frozen=True)
class Result:
    """What one command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as the one strict JSON document (no NaN, no Infinity)."""
        return json.loads(self.out, parse_constant=_no_constant)


Command = Callable[..., Result]


_find_profile = functools.cache(lookup.find_profile)


@pytest.fixture
def flopcast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """flopcast("predict", "--gpu", ...) runs the command in this process, as `main` would.

    What ships is loaded once a run, which halves the time of these tests.
    """
    real = lookup.find_profile
    monkeypatch.setattr(
        lookup, "find_profile", lambda name: (_find_profile if name in SHIPPED else real)(name)
    )

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["flopcast", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as left:
            code = left.code or 0
        return Result(code, *capsys.readouterr())

    return run


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flopcast", *arguments], capture_output=True, text=True, timeout=60
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- bad use: exit 2, one message, nothing on stdout --------------------------------------------------------

QWEN3 = load_config("qwen3-0.6b")
FILES = {
    "not.json": "width: 512",
    "list.json": "[]",
    "kindless.json": '{"hidden_size": 64}',
    "alien.json": '{"model_type": "no-such-model", "hidden_size": 64, "num_hidden_layers": 2}',
    "heads.json": json.dumps({**QWEN3, "num_attention_heads": 6, "num_key_value_heads": 4}),
    "negative.json": json.dumps({**QWEN3, "hidden_size": -64}),
    "text.json": json.dumps({**QWEN3, "num_hidden_layers": "two"}),
    "newer.json": '{"schema": 99, "surfaces": {}}',
    "plain": "a file, not a folder",
    "empty.csv": "",
    "typo.csv": "width,bach\n512,4\n",
    "twice.csv": "width,width\n512,256\n",
    "kernels-typo.csv": "op,m,n,k,layuot\ngemm,64,64,64,nn\n",
    "steps.csv": "width\n512\n",
    "shapes.csv": "m,n,k\n64,64,64\n",
    "prices.csv": "gpu,provider,kind,usd_per_hour,date\nnvidia-h200,RunPod Secure Cloud,on-demand,-3,2026-01-01\n",
}

SIZES = "valid is an integer of at least 1"
MEASURE = ("flopcast bench", "flopcast fit")

BAD_USE: dict[str, tuple[str, Sequence[str]]] = {
    # GPUs and profiles
    "unknown GPU": ("predict --gpu h300 --width 512", ("'h300'", "nvidia-h200", "nvidia-l4", *MEASURE)),
    "a GPU misspelt": ("predict --gpu NVIDIA_H200 --width 512", ("Did you mean nvidia-h200",)),
    "unmeasured processor": ("predict --gpu cpu --width 512", ("processor", "--device cpu", *MEASURE)),
    "missing profile": ("predict --gpu no.json --width 512", ("no.json", "does not exist", "flopcast fit")),
    "no profile at all": ("predict --gpu not.json --width 512", ("not.json", "not a profile", "flopcast fit")),
    "a folder as profile": ("predict --gpu ./ --width 512", ("not a profile",)),
    "newer profile": ("predict --gpu newer.json --width 512", ("schema 99", "(1)", "upgrade")),
    "unknown host": (f"predict --gpu {H200} --width 512 --host h300", ("'h300'", "nvidia-h200")),
    # models
    "no model": (f"predict --gpu {H200}", ("no model", "config", "width")),
    "unknown config": (f"predict --gpu {H200} --config qwen9", ("'qwen9'", "qwen3-0.6b", "config.json")),
    "config not JSON": (f"predict --gpu {H200} --config not.json", ("not.json", "not JSON", "config.json")),
    "config no object": (f"predict --gpu {H200} --config list.json", ("list.json", "model_type")),
    "config of no type": (f"predict --gpu {H200} --config kindless.json", ("kindless.json", "model_type")),
    "config of unknown type": (
        f"predict --gpu {H200} --config alien.json", ("'no-such-model'", "causal language model")),
    "config with bad heads": (
        f"predict --gpu {H200} --config heads.json", ("heads 6", "kv_heads 4", "valid kv_heads are 1, 2, 3, 6")),
    "config with a negative size": (f"predict --gpu {H200} --config negative.json", ("hidden_size", "-64", SIZES)),
    "config with text for a size": (f"predict --gpu {H200} --config text.json", ("'two'", SIZES)),
    "config and shape": (f"predict --gpu {H200} --config qwen3-0.6b --width 512", ("config and width", "either")),
    "bad heads": (
        f"predict --gpu {H200} --width 768 --heads 6 --kv-heads 4", ("heads 6", "kv_heads 4", "1, 2, 3, 6")),
    "zero width": (f"predict --gpu {H200} --width 0", ("width is 0", SIZES)),
    "negative width": (f"predict --gpu {H200} --width -512", ("width is -512", SIZES)),
    "text as width": (f"predict --gpu {H200} --width wide", ("--width", "integer")),
    **{
        f"zero {name}": (f"predict --gpu {H200} --width 512 --{name.replace('_', '-')} 0", (name, " 0", SIZES))
        for name in ("depth", "heads", "kv_heads", "head_dim", "ffn", "vocab", "batch", "seq", "accumulate")
    },
    "negative batch": (f"predict --gpu {H200} --width 512 --batch -4", ("batch is -4", SIZES)),
    "odd head_dim": (f"predict --gpu {H200} --width 512 --head-dim 127", ("head_dim 127", "even")),
    "under one layer": (
        f"predict --gpu {H200} --width 8", ("'printed'", "0 layers", "width 8", "larger width", "--depth")),
    "under one layer by ln": (f"predict --gpu {H200} --width 8 --depth-law ln", ("'ln'", "0 layers", "width 8")),
    "unknown depth law": (f"predict --gpu {H200} --width 512 --depth-law deep", ("'deep'", "printed, ln, qwen3")),
    "zero layers of a config": (f"predict --gpu {H200} --config qwen3-0.6b --depth 0", ("depth", "0", SIZES)),
    # runs
    "unknown precision": (f"predict --gpu {H200} --width 512 --precision fp8", ("'fp8'", "autocast-bf16, bf16")),
    "unknown optimizer": (f"predict --gpu {H200} --width 512 --optimizer sgd", ("'sgd'", "adamw, adamw-fused")),
    "unknown mode": (f"predict --gpu {H200} --width 512 --mode quick", ("'quick'", "eager, compile")),
    "compile": (f"predict --gpu {H200} --width 512 --mode compile", ("'compile'", "not modelled yet", "eager")),
    "no micro-batch": (f"predict --gpu {H200} --width 512 --accumulate 0", ("accumulate is 0", "at least 1")),
    "unknown checkpointing": (f"predict --gpu {H200} --width 512 --checkpoint half", ("'half'", "none, full")),
    "no such module": (f"predict --gpu {H200} --module no_such:f", ("'no_such:f'", "No module named", "PYTHONPATH")),
    "no such factory": (
        f"predict --gpu {H200} --module flopcast.microbench.zoo:vit", ("vit does not exist", "resnet50", "vit_b16")),
    "a module with a width": (f"predict --gpu {H200} --module a.b:c --width 512", ("--module", "--width", "one of")),
    "unknown matmul": (f"predict --gpu {H200} --width 512 --matmul mkl", ("'mkl'", "torch, triton")),
    "unknown attention": (f"predict --gpu {H200} --width 512 --attention flex", ("'flex'", "sdpa-flash")),
    # prices
    "negative price": (f"predict --gpu {H200} --width 512 --price {H200}=-1", ("'-1'", "above zero")),
    "price of nothing": (f"predict --gpu {H200} --width 512 --price 3.99", ("'3.99'", "GPU=USD_PER_HOUR")),
    "price that is none": (f"predict --gpu {H200} --width 512 --price {H200}=nan", ("'nan'", "above zero")),
    "price of an unknown GPU": (f"predict --gpu {H200} --width 512 --price h300=1", ("'h300'", "nvidia-h200")),
    "negative price in a book": (
        f"predict --gpu {H200} --width 512 --prices prices.csv", ("prices.csv line 2", "'-3'", "above zero")),
    "missing price book": (f"predict --gpu {H200} --width 512 --prices no.csv", ("no.csv", "does not exist")),
    "bad day": (f"predict --gpu {H200} --width 512 --on yesterday", ("'yesterday'", "YYYY-MM-DD")),
    "unknown provider": (f"predict --gpu {H200} --width 512 --provider acme", ("'acme'", "RunPod Secure Cloud")),
    # cost
    "GPU without a price": (
        "cost --gpus nvidia-rtx-3090 --widths 512 --on 2020-01-01",
        ("nvidia-rtx-3090", "2020-01-01", "--price nvidia-rtx-3090=USD_PER_HOUR")),
    "unknown GPU of several": (f"cost --gpus {H200},h300 --widths 512", ("'h300'", "nvidia-l4", *MEASURE)),
    "no GPU": ("cost --gpus , --widths 512", ("no GPU", "flopcast gpus")),
    "widths that are none": ("cost --widths 512,wide", ("--widths", "'512,wide'", "integers")),
    "no widths": ("cost --widths ,", ("--widths", "','", "integers")),
    "cost under one layer": ("cost --widths 8,512", ("0 layers", "width 8")),
    "cost by an unknown law": ("cost --depth-law deep", ("'deep'", "printed, ln, qwen3")),
    "cost with a bad optimizer": ("cost --widths 512 --optimizer sgd", ("'sgd'", "adamw-fused")),
    "cost into a file": (f"cost --gpus {H200} --widths 512 --out plain/new", ("plain/new", "cannot be written")),
    # CSV
    **{
        f"{command} of a missing file": (
            f"{command} --gpu {H200} --from no.csv --out out.csv", ("no.csv", "cannot be read", "CSV"))
        for command in ("sweep", "kernels")
    },
    **{
        f"{command} of an empty file": (
            f"{command} --gpu {H200} --from empty.csv --out out.csv", ("empty.csv", "empty", "header"))
        for command in ("sweep", "kernels")
    },
    "sweep with a misspelt column": (
        f"sweep --gpu {H200} --from typo.csv --out out.csv", ("typo.csv", "bach", "batch", "kv_heads")),
    "sweep with a column twice": (f"sweep --gpu {H200} --from twice.csv --out out.csv", ("'width'", "twice")),
    "kernels with a misspelt column": (
        f"kernels --gpu {H200} --from kernels-typo.csv --out out.csv", ("layuot", "layout", "head_dim")),
    "sweep into a file": (f"sweep --gpu {H200} --from steps.csv --out plain/out.csv", ("plain/out.csv", "--out")),
    "kernels into /proc": (f"kernels --gpu {H200} --from shapes.csv --out /proc/no/out.csv", ("/proc/no", "--out")),
    "sweep on an unknown GPU": ("sweep --gpu h300 --from steps.csv --out out.csv", ("'h300'", *MEASURE)),
    "kernels on an unknown GPU": ("kernels --gpu h300 --from shapes.csv --out out.csv", ("'h300'", *MEASURE)),
    # measuring
    "unknown suite": ("bench --device cpu --suite tiny", ("'tiny'", "quick, standard")),
    "unknown device": ("bench --device tpu", ("'tpu'", "cuda, cuda:N, cpu")),
    "negative budget": ("bench --device cpu --budget -1", ("--budget", "-1", "0 or more")),
    "bench into a file": ("bench --device cpu --out plain/new", ("plain/new", "cannot be written", "--out")),
    "fit of nothing": ("fit nowhere", ("nowhere", "does not exist", "flopcast bench --out nowhere")),
    "validate by an unknown suite": ("validate --suite tiny", ("'tiny'", "quick, standard")),
    "validate an unknown GPU": ("validate --device cpu --gpu h300", ("'h300'", *MEASURE)),
    "validate without a profile": ("validate --device cpu", ("processor", *MEASURE)),
    "validate another's profile": (f"validate --device cpu --gpu {H200}", (H200, "cuda", "cpu", *MEASURE)),
    "validate steps from nowhere": (f"validate --steps-from nowhere --gpu {H200}", ("nowhere", "flopcast validate")),
    "report on nothing": ("report", ("--measure", "--gpu", "--measurements")),
    "report on an unknown GPU": ("report --gpu h300", ("'h300'", *MEASURE)),
    "report into a file": (f"report --gpu {H200} --out plain/rep", ("plain/rep", "cannot be written", "--out")),
    "report of steps from nowhere": (f"report --gpu {H200} --steps nowhere", ("nowhere", "flopcast validate")),
    "report of missing measurements": ("report --measurements nowhere --out .", ("nowhere", "flopcast bench")),
    "roofline of an unknown GPU": ("roofline --gpu h300", ("'h300'", *MEASURE)),
    "unknown command": ("forecast", ("forecast",)),
    "unknown option": (f"predict --gpu {H200} --widht 512", ("--widht",)),
    "option left out": ("predict --width 512", ("--gpu",)),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, holding FILES; nobody's cache."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lookup, "user_folder", lambda: tmp_path / "no-profiles")
    return tmp_path


@pytest.mark.parametrize("case", BAD_USE)
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_bad_use_is_refused_with_a_message(flopcast: Command, folder: Path, case: str, as_json: bool) -> None:
    command, said = BAD_USE[case]
    before = sorted(folder.iterdir())
    result = flopcast(*command.split(), *(["--json"] if as_json else []))
    assert result.code == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    assert len(result.err) < 1500
    message = result.err if "Usage:" in result.err else " ".join(result.err.split())
    assert [part for part in said if part not in message] == []
    assert sorted(folder.iterdir()) == before, "something was written"


def test_a_module_by_name(flopcast: Command, folder: Path) -> None:
    (folder / "mine.py").write_text(
        "import torch\ndef pair(batch=4):\n    return torch.nn.Linear(64, 8), torch.randn(batch, 64)\n"
    )
    found = flopcast("predict", "--gpu", H200, "--module", "mine:pair", "--batch", 32, "--json")
    assert found.code == 0, found.err
    record = json.loads(found.out)
    assert record["n_params"] == 64 * 8 + 8
    assert record["flops_counted"] == 2 * 2 * 32 * 64 * 8  # forward and the weights' gradient
    assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(32)


def test_a_device_that_is_not_there_is_named_and_the_processor_offered(
    flopcast: Command, folder: Path
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for command in ("bench", "validate"):
        result = flopcast(command, "--device", "cuda")
        assert (result.code, result.out) == (2, "")
        assert "CUDA" in result.err
        assert "--device cpu" in result.err
    assert not (folder / "out").exists()


# --- exit codes of real processes ---------------------------------------------------------------------------


def test_a_process_exits_0_with_its_answer_and_2_with_a_message() -> None:
    good = process("gpus", "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert H200 in good.stdout
    bad = process("predict", "--gpu", "h300", "--width", "512")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("flopcast: unknown GPU 'h300'")
    assert len(bad.stderr.splitlines()) == 1


def test_a_reader_that_leaves_early_ends_it_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "flopcast", "gpus", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.stderr is not None
        assert b"Traceback" not in running.stderr.read()
        assert running.wait(60) in (0, 1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RunError("no room to write x"), "no room to write x"),
        (KeyboardInterrupt(), "finished measurements are kept"),
    ],
)
def test_what_fails_although_it_was_asked_well_exits_1(
    flopcast: Command, monkeypatch: pytest.MonkeyPatch, fault: BaseException, said: str
) -> None:
    def fail() -> None:
        raise fault

    monkeypatch.setattr(lookup, "known", fail)
    result = flopcast("gpus")
    assert (result.code, result.out) == (1, "")
    assert said in result.err
    assert "Traceback" not in result.err


def test_version_and_help(flopcast: Command) -> None:
    assert flopcast("--version").out.startswith("flopcast 0")
    helped = flopcast("--help")
    assert helped.code == 0
    for command in (
        "bench",
        "fit",
        "gpus",
        "predict",
        "sweep",
        "kernels",
        "validate",
        "cost",
        "roofline",
        "report",
    ):
        assert command in helped.out
        assert flopcast(command, "--help").code == 0


def test_a_document_is_printed_whole_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        cli.emit({"first": 1, "second": math.nan})
    assert capsys.readouterr().out == ""


# --- predict ------------------------------------------------------------------------------------------------

FORECAST = {
    "gpu", "profile_basis", "mode", "n_params", "depth", "step_seconds", "step_seconds_low", "step_seconds_high",
    "device_seconds", "host_seconds", "host", "bound", "tokens_per_second", "flops_counted", "flops_6n", "mfu",
    "mfu_6n", "peak_flops_per_second", "peak_bytes", "fits", "breakdown", "usd_per_step", "flops_per_usd", "price",
    "stack",
}  # fmt: skip


def predict(flopcast: Command, *arguments: object, command: Sequence[object] = PREDICT) -> dict[str, Any]:
    result = flopcast(*command, *arguments, "--json")
    assert result.code == 0, result.err
    assert result.err == "", "a terminal's progress, or a table, where there is none"
    document: dict[str, Any] = result.document
    return document


def test_predict_keeps_the_contract(flopcast: Command) -> None:
    found = predict(flopcast)
    assert set(found) >= FORECAST
    assert set(found["price"]) == {"usd_per_hour", "provider", "date"}
    assert found["breakdown"]
    assert all(set(share) == {"class", "seconds", "flops", "bytes", "calls"} for share in found["breakdown"])


def test_the_numbers_of_a_forecast_agree(flopcast: Command) -> None:
    found = predict(flopcast)
    assert (found["gpu"], found["profile_basis"], found["mode"], found["depth"]) == (
        H200,
        "measured",
        "eager",
        4,
    )
    assert 0 < found["step_seconds_low"] <= found["step_seconds"] <= found["step_seconds_high"]
    assert found["step_seconds"] >= found["device_seconds"] > 0
    assert sum(share["seconds"] for share in found["breakdown"]) == pytest.approx(found["device_seconds"])
    assert sum(share["flops"] for share in found["breakdown"]) == found["flops_counted"]
    tokens = 4 * 256
    assert found["flops_6n"] == 6 * found["n_params"] * tokens
    assert found["tokens_per_second"] == pytest.approx(tokens / found["step_seconds"])
    rate = found["step_seconds"] * found["peak_flops_per_second"]
    assert found["mfu"] == pytest.approx(found["flops_counted"] / rate)
    assert found["mfu_6n"] == pytest.approx(found["flops_6n"] / rate)
    usd = found["price"]["usd_per_hour"] / 3600 * found["step_seconds"]
    assert found["usd_per_step"] == pytest.approx(usd)
    assert found["flops_per_usd"] == pytest.approx(found["flops_counted"] / usd)
    assert found["bound"] in ("matrix", "memory", "host")
    assert found["fits"] is True


def test_a_forecast_prints_as_tables_on_stdout(flopcast: Command) -> None:
    result = flopcast(*PREDICT)
    assert result.code == 0
    for part in (
        "step, 90% interval",
        "host (to enqueue",
        "MFU",
        "peak memory",
        "per million tokens",
        "gemm",
    ):
        assert part in result.out
    assert "nan" not in result.out.lower().split()


def test_a_config_by_name_by_file_and_of_another_depth(flopcast: Command, tmp_path: Path) -> None:
    command = ("predict", "--gpu", H200, "--config")
    named = predict(flopcast, "qwen3-0.6b", command=command)
    assert (named["depth"], named["n_params"]) == (28, 596_049_920)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3))
    shallow = predict(flopcast, "qwen3-0.6b", "--depth", 3, command=command)
    assert predict(flopcast, file, "--depth", 3, command=command) == shallow
    assert shallow["depth"] == 3
    a_layer = (named["n_params"] - shallow["n_params"]) / 25
    assert a_layer == int(a_layer) > 0
    assert shallow["device_seconds"] < named["device_seconds"]


def test_depth_overrides_the_law_and_the_law_the_default(flopcast: Command) -> None:
    assert predict(flopcast, "--depth", 7)["depth"] == 7
    assert predict(flopcast, "--depth-law", "ln")["depth"] == 10


@pytest.mark.parametrize(("tied", "heads"), [((), 1), (("--untied",), 2)])
def test_sizes_given_are_the_sizes_used(flopcast: Command, tied: Sequence[str], heads: int) -> None:
    """Embedding and head are tied unless asked otherwise."""
    found = predict(flopcast, "--depth", 2, "--vocab", 1000, "--heads", 8, "--kv-heads", 2, "--head-dim", 32,
                    "--ffn", 640, "--batch", 2, "--seq", 64, *tied)  # fmt: skip
    attention = 2 * 512 * 8 * 32 + 2 * 512 * 2 * 32 + 2 * 32
    assert found["n_params"] == heads * 1000 * 512 + 2 * (attention + 3 * 512 * 640 + 2 * 512) + 512
    assert found["flops_6n"] == 6 * found["n_params"] * 2 * 64


@pytest.mark.parametrize("option", ["--matmul", "--attention"])
def test_triton_kernels_are_composed_into_the_step(flopcast: Command, option: str) -> None:
    usual, other = predict(flopcast), predict(flopcast, option, "triton")
    assert other["n_params"] == usual["n_params"]
    assert other["flops_counted"] == usual["flops_counted"]
    assert 0.1 < other["step_seconds"] / usual["step_seconds"] < 10
    changed = {"--matmul": "gemm", "--attention": "attention"}[option]
    for one, two in zip(usual["breakdown"], other["breakdown"], strict=True):
        assert (one["seconds"] != two["seconds"]) is (one["class"] == changed)


def test_without_a_host_the_device_is_alone(flopcast: Command) -> None:
    found = predict(flopcast, "--host", "none")
    assert (found["host"], found["host_seconds"]) == ("none", 0)
    assert found["step_seconds"] >= found["device_seconds"]
    assert found["bound"] != "host"


def test_another_gpu_may_be_fed_by_a_measured_host(flopcast: Command) -> None:
    own = predict(flopcast)
    found = predict(flopcast, "--host", H200, command=("predict", "--gpu", "nvidia-l4", "--width", 512))
    assert (found["gpu"], found["profile_basis"]) == ("nvidia-l4", "projected")
    assert found["host"] == own["host"]
    assert found["host_seconds"] > 0
    assert found["device_seconds"] > own["device_seconds"]


def test_a_projection_is_called_one(flopcast: Command) -> None:
    command = ("predict", "--gpu", "nvidia-b200", "--width", "512")
    assert "(projected)" in flopcast(*command).out
    assert predict(flopcast, command=command)["profile_basis"] == "projected"


def shipped_file() -> Path:
    return next(PROFILES.glob(f"{H200}.json*"))


def test_a_profile_file_answers_as_its_name_does(flopcast: Command, tmp_path: Path) -> None:
    file = tmp_path / shipped_file().name
    shutil.copy(shipped_file(), file)
    assert predict(flopcast, command=("predict", "--gpu", file, "--width", 512)) == predict(flopcast)


def test_a_gpu_known_by_its_file_alone_may_be_given_a_price(flopcast: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    Profile.from_json({**Profile.load(shipped_file()).to_json(), "gpu": "my-gpu"}).save(file)
    command = ("predict", "--gpu", file, "--width", 512)
    unpriced = predict(flopcast, command=command)
    assert [unpriced[name] for name in ("price", "usd_per_step", "flops_per_usd")] == [None] * 3
    assert predict(flopcast, "--price", "my-gpu=2.5", command=command)["price"]["usd_per_hour"] == 2.5
    costs = flopcast("cost", "--gpus", file, "--widths", 512, "--price", "my-gpu=2.5", "--json")
    assert costs.document["points"][0]["price_usd_per_hour"] == 2.5


def test_what_does_not_fit_says_so(flopcast: Command) -> None:
    command = ("predict", "--gpu", "nvidia-l4", "--config", "qwen3-8b")
    assert predict(flopcast, command=command)["fits"] is False


# --- prices -------------------------------------------------------------------------------------------------


def test_a_price_of_the_command_line_counts(flopcast: Command) -> None:
    found = predict(flopcast, "--price", f"{H200}=2.0")
    assert (found["price"]["usd_per_hour"], found["price"]["provider"]) == (2.0, "given")
    assert found["usd_per_step"] == pytest.approx(2.0 / 3600 * found["step_seconds"])
    assert "as given" in flopcast(*PREDICT, "--price", f"{H200}=2.0").out


def test_an_older_day_has_its_own_price(flopcast: Command) -> None:
    newest, article = predict(flopcast), predict(flopcast, "--on", "2025-11-15")
    assert article["price"] == {"usd_per_hour": 3.59, "provider": "RunPod Secure Cloud", "date": "2025-11-15"}
    assert newest["price"]["date"] > article["price"]["date"]
    assert predict(flopcast, "--on", "2019-01-01")["price"] is None


def test_another_provider_and_another_book(flopcast: Command, tmp_path: Path) -> None:
    assert predict(flopcast, "--provider", "Hyperstack")["price"]["provider"] == "Hyperstack"
    book = tmp_path / "book.csv"
    book.write_text(f"gpu,provider,kind,usd_per_hour,date\n{H200},acme,on-demand,1.25,2026-01-01\n")
    found = predict(flopcast, "--prices", book, "--provider", "acme")
    assert found["price"] == {"usd_per_hour": 1.25, "provider": "acme", "date": "2026-01-01"}


# --- gpus, roofline -----------------------------------------------------------------------------------------


def test_every_gpu_of_the_design_is_known(flopcast: Command) -> None:
    found = {entry["name"]: entry for entry in flopcast("gpus", "--json").document}
    assert set(found) >= {
        H200, "nvidia-h100-sxm", "nvidia-h100-pcie", "nvidia-a100-80gb-sxm", "nvidia-a100-80gb-pcie",
        "nvidia-a100-40gb-sxm", "nvidia-l4", "nvidia-l40s", "nvidia-a10g", "nvidia-rtx-a6000",
        "nvidia-rtx-4090", "nvidia-rtx-3090", "nvidia-b200",
    }  # fmt: skip
    assert (found[H200]["basis"], found[H200]["source"]) == ("measured", "shipped")
    assert found["nvidia-l4"]["basis"] == "projected"
    assert H200 in found["nvidia-l4"]["source"]
    assert "projected" in flopcast("gpus").out


def test_roofs_are_printed_with_what_they_rest_on(flopcast: Command) -> None:
    found = flopcast("roofline", "--gpu", H200, "--json").document
    assert (found["gpu"], found["basis"]) == (H200, "measured")
    for number in (*found["ceilings"].values(), *found["peaks"].values()):
        assert number["low"] <= number["value"] <= number["high"]
        assert number["basis"]
    assert {"hbm_copy", "matrix_burst/bf16", "matrix_sustained/bf16", "kernel_floor"} <= set(
        found["ceilings"]
    )
    shown = flopcast("roofline", "--gpu", H200).out
    assert "TFLOP/s" in shown
    assert "FLOP per byte" in shown


# --- sweep and kernels --------------------------------------------------------------------------------------

SCALARS = [*sorted(FORECAST - {"breakdown", "price", "stack"}), "price_usd_per_hour", "reason", "warnings"]


def test_a_sweep_answers_each_row_as_predict_does(flopcast: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "steps.csv", tmp_path / "new" / "out.csv"
    source.write_text(
        "name,config,width,depth,batch,seq,optimizer,tied\n"
        "small,,512,,4,256,adamw,true\n"
        "config,qwen3-0.6b,,3,8,1024,adamw-fused,\n"
        "wide,,0,,,,,\n"
        "shapeless,,,,,,,\n"
    )
    result = flopcast("sweep", "--gpu", H200, "--from", source, "--out", out, "--json")
    assert result.document == {"out": str(out), "rows": 4, "forecast": 2, "failed": 2}
    rows = rows_of(out)
    assert set(rows[0]) == {"name", "config", "width", "batch", "seq", "optimizer", "tied", *SCALARS}
    assert [row["name"] for row in rows] == ["small", "config", "wide", "shapeless"]
    single = predict(flopcast)
    for name in SCALARS:
        if isinstance(single.get(name), float):
            assert float(rows[0][name]) == pytest.approx(single[name], rel=1e-6)
    assert rows[0]["fits"] == "true"
    assert rows[0]["tied"] == "true"
    assert rows[0]["n_params"] == str(single["n_params"])
    assert float(rows[0]["price_usd_per_hour"]) == single["price"]["usd_per_hour"]
    assert (rows[1]["depth"], rows[1]["mode"], rows[1]["reason"]) == ("3", "eager", "")
    assert "width is 0" in rows[2]["reason"]
    assert "no model" in rows[3]["reason"]
    for row in rows[2:]:
        assert all(row[name] == "" for name in SWEEP_OUT if name != "reason")


def test_a_sweep_without_json_reports_on_stderr(flopcast: Command, folder: Path) -> None:
    result = flopcast("sweep", "--gpu", H200, "--from", "steps.csv", "--out", "out.csv", "--host", "none",
                      "--price", f"{H200}=2")  # fmt: skip
    assert (result.code, result.out) == (0, "")
    assert "1 of 1 steps forecast for nvidia-h200 (measured) -> out.csv" in result.err
    row = rows_of(folder / "out.csv")[0]
    assert (row["host"], row["host_seconds"], row["price_usd_per_hour"]) == ("none", "0", "2")


def test_kernels_are_timed_alone(flopcast: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "shapes.csv", tmp_path / "out.csv"
    source.write_text(
        "name,op,m,n,k,layout,batch,heads,kv_heads,seq,head_dim,causal,direction,dtype,backend,cache\n"
        "big,gemm,8192,8192,8192,nt,,,,,,,,bf16,torch,cold\n"
        "tiny,gemm,16,16,16,nn,,,,,,,,bf16,torch,hot\n"
        "row,gemm,1,8192,8192,nt,,,,,,,,bf16,,\n"
        "own,gemm,1024,1024,1024,tn,,,,,,,,bf16,triton,\n"
        "att,attention,,,,,4,16,8,1024,128,true,fwd,bf16,sdpa,cold\n"
        "back,attention,,,,,4,16,8,1024,128,true,bwd,bf16,sdpa-flash,cold\n"
        "heads,attention,,,,,4,6,4,1024,128,true,fwd,bf16,sdpa,cold\n"
        "cell,gemm,64,64,big,nt,,,,,,,,bf16,torch,cold\n"
        "zero,gemm,64,0,64,nt,,,,,,,,bf16,torch,cold\n"
        "none,gemm,64,64,,nt,,,,,,,,bf16,torch,cold\n"
        "conv,conv,64,64,64,nt,,,,,,,,bf16,torch,cold\n"
        "layout,gemm,64,64,64,tt,,,,,,,,bf16,torch,cold\n"
        "dtype,gemm,64,64,64,nt,,,,,,,,fp8,torch,cold\n"
        "backend,gemm,64,64,64,nt,,,,,,,,bf16,sdpa,cold\n"
        "cache,gemm,64,64,64,nt,,,,,,,,bf16,torch,warm\n"
        "causal,attention,,,,,4,16,8,1024,128,perhaps,fwd,bf16,sdpa,cold\n"
    )
    result = flopcast("kernels", "--gpu", H200, "--from", source, "--out", out, "--json")
    assert result.document == {"out": str(out), "rows": 16, "timed": 6, "failed": 10}
    rows = {row["name"]: row for row in rows_of(out)}
    assert list(rows)[:3] == ["big", "tiny", "row"]
    assert {"seconds", "seconds_low", "seconds_high", "tflops", "bound", "basis", "reason"} <= set(
        rows["big"]
    )
    for name in ("big", "tiny", "row", "own", "att", "back"):
        row = rows[name]
        assert 0 < float(row["seconds_low"]) <= float(row["seconds"]) <= float(row["seconds_high"])
        assert row["basis"] in ("measured", "interpolated", "extrapolated")
        assert row["reason"] == ""
    assert float(rows["big"]["tflops"]) == pytest.approx(2 * 8192**3 / float(rows["big"]["seconds"]) / 1e12)
    assert [rows[name]["bound"] for name in ("big", "tiny", "row")] == ["matrix", "launch", "memory"]
    said = {"heads": "kv_heads 4", "cell": "k is 'big'", "zero": "n is 0", "none": "k is missing", "conv": "'conv'",
            "layout": "nt, nn, tn", "dtype": "'fp8'", "backend": "torch, triton", "cache": "cold, hot",
            "causal": "true and false"}  # fmt: skip
    for name, part in said.items():
        assert part in rows[name]["reason"]
        assert rows[name]["seconds"] == rows[name]["tflops"] == rows[name]["bound"] == ""


def test_ten_thousand_operations_are_answered(flopcast: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "shapes.csv", tmp_path / "out.csv"
    shapes = [(64 * (i % 97 + 1), 64 * (i % 89 + 1), 32 * (i % 83 + 1)) for i in range(10_000)]
    layouts = ("nt", "nn", "tn")
    lines = (f"{m},{n},{k},{layouts[i % 3]}" for i, (m, n, k) in enumerate(shapes))
    source.write_text("m,n,k,layout\n" + "\n".join(lines) + "\n")
    assert flopcast("kernels", "--gpu", H200, "--from", source, "--out", out).code == 0
    rows = rows_of(out)
    assert [(int(row["m"]), int(row["n"]), int(row["k"])) for row in rows] == shapes
    assert all(math.isfinite(float(row["seconds"])) and float(row["seconds"]) > 0 for row in rows)


# --- cost ---------------------------------------------------------------------------------------------------

COST = ("cost", "--gpus", f"{H200},nvidia-l4", "--widths", "512,1024")


def test_cost_keeps_its_shape(flopcast: Command) -> None:
    found = flopcast(*COST, "--json").document
    assert set(found) >= {"ladder", "points", "crossovers", "break_even", "best"}
    assert found["ladder"] == [{"width": 512, "depth": 4}, {"width": 1024, "depth": 5}]
    assert [(p["gpu"], p["width"]) for p in found["points"]] == [
        (H200, 512), (H200, 1024), ("nvidia-l4", 512), ("nvidia-l4", 1024)
    ]  # fmt: skip
    assert {p["profile_basis"] for p in found["points"] if p["gpu"] == "nvidia-l4"} == {"projected"}
    for point in found["points"]:
        assert point["flops_per_usd_low"] <= point["flops_per_usd"] <= point["flops_per_usd_high"]
        assert point["price_provider"] == "RunPod Secure Cloud"
        assert point["price_date"]
    assert all(row["sentence"] for row in found["crossovers"])
    assert {row["gpu"] for row in found["best"]} <= {H200, "nvidia-l4"}


def test_cost_prints_the_ladder_the_prices_and_the_comparison(flopcast: Command) -> None:
    found = flopcast(*COST)
    for part in ("512 x 4", "1024 x 5", "projected", "measured", "RunPod Secure Cloud"):
        assert part in found.out
    sentences = [row["sentence"] for row in flopcast(*COST, "--json").document["crossovers"]]
    assert [f"- {s}" in " ".join(found.out.split()) for s in sentences] == [True]
    assert found.err == ""


def test_cost_crosses_where_prices_make_it(flopcast: Command) -> None:
    """At the price ratio that breaks even between two sizes, the curves cross there."""
    even = flopcast(*COST, "--json").document["break_even"]
    ratios = [row["ratio"] for row in even if row["gpu_a"] == H200 and row["gpu_b"] == "nvidia-l4"]
    middle = math.sqrt(ratios[0] * ratios[-1])
    found = flopcast(*COST, "--price", f"{H200}={middle}", "--price", "nvidia-l4=1", "--json").document
    row = found["crossovers"][0]
    sizes = [point["n_params"] for point in found["points"] if point["gpu"] == H200]
    assert row["status"] in ("crossover", "not separable at these prices")
    assert sizes[0] <= row["n_params"] <= sizes[-1]


def test_cost_does_not_depend_on_the_order_of_widths_or_on_repeats(flopcast: Command) -> None:
    straight = flopcast("cost", "--gpus", H200, "--widths", "512,1024")
    mixed = flopcast("cost", "--gpus", f"{H200},{H200}", "--widths", "1024,512,1024")
    assert mixed.out == straight.out


def test_cost_writes_its_tables_and_figure(flopcast: Command, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    result = flopcast("cost", "--gpus", f"{H200},nvidia-l4", "--widths", 512, "--out", out, "--json")
    assert result.code == 0
    assert sorted(path.name for path in out.iterdir()) == ["cost.csv", "cost.png", "crossovers.csv"]
    assert all(str(path) in result.err for path in out.iterdir())
    points = result.document["points"]
    rows = rows_of(out / "cost.csv")
    assert [row["gpu"] for row in rows] == [point["gpu"] for point in points]
    assert [float(row["usd_per_step"]) for row in rows] == pytest.approx(
        [point["usd_per_step"] for point in points], rel=1e-6
    )
    assert (out / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_too_large_for_one_gpu_leaves_a_gap_there(flopcast: Command) -> None:
    command = ("cost", "--gpus", f"{H200},nvidia-l4", "--widths", "512,4096")
    assert "no memory" in flopcast(*command).out
    found = flopcast("cost", "--gpus", "nvidia-l4", "--widths", "4096", "--json").document
    (point,) = found["points"]
    assert (point["fits"], point["flops_per_usd"], point["reason"]) == (False, None, "out of memory")


# --- whole numbers ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(), min_size=1))
def test_numbers_with_commas_are_read_back(numbers: list[int]) -> None:
    assert cli.whole_numbers("--widths", ", ".join(map(str, numbers))) == numbers
