"""`predict`, `gpus` and `roofline` as scripts and people meet them: the contract of their output."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.profile.profile import PROFILES, Profile
from flopcast.roofline.stream.model.models import load_config

H200 = "nvidia-h200"
# A step whose stream ships, so that no test but those of other shapes traces one.
PREDICT = ("predict", "--gpu", H200, "--width", "512")
QWEN3 = load_config("qwen3-0.6b")
Command = Callable[..., Any]


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
    assert set(found["price"]) == {"usd_per_hour", "provider", "date", "age_days"}
    assert found["breakdown"]
    assert all(set(share) == {"class", "seconds", "flops", "bytes", "calls"} for share in found["breakdown"])


def test_the_numbers_of_a_forecast_agree(flopcast: Command) -> None:
    found = predict(flopcast)
    assert (found["gpu"], found["profile_basis"], found["mode"], found["depth"]) == (H200, "measured", "eager", 4)
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
    for part in ("step, 90% interval", "host (to enqueue", "MFU", "peak memory", "per million tokens", "gemm"):
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


def test_a_profile_file_answers_as_its_name_does(tmp_path: Path) -> None:
    """Each read now, by a process of its own: one kept from before may be of a file that was replaced meanwhile, and
    kernels asked in other company, as by the steps of other tests, are summed up in another order."""
    file = tmp_path / shipped_file().name
    shutil.copy(shipped_file(), file)
    one, other = (
        json.loads(
            subprocess.run(
                [sys.executable, "-m", "flopcast", *f"predict --gpu {gpu} --width 512 --host none --json".split()],
                capture_output=True, text=True, check=True, timeout=120,
            ).stdout
        )
        for gpu in (str(file), H200)
    )  # fmt: skip
    assert numbers(one) == pytest.approx(numbers(other), rel=1e-9)
    assert words(one) == words(other)


def numbers(document: Any) -> list[float]:
    """All numbers of a document with a fraction, in order."""
    if isinstance(document, dict | list):
        inner = document.values() if isinstance(document, dict) else document
        return [number for value in inner for number in numbers(value)]
    return [document] if isinstance(document, float) else []


def words(document: Any) -> Any:
    """The document with these left out."""
    if isinstance(document, dict):
        return {name: words(value) for name, value in document.items()}
    if isinstance(document, list):
        return [words(value) for value in document]
    return None if isinstance(document, float) else document


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
    found = predict(flopcast, "--on", "2026-11-15", command=command)
    assert (found["fits"], found["usd_per_step"], found["flops_per_usd"]) == (False, None, None)
    assert found["price"]["usd_per_hour"] == 0.49
    out = " ".join(flopcast(*command, "--on", "2026-11-15").out.split())
    assert "DOES NOT FIT" in out
    assert "cost │ - (does not fit)" in out
    assert "per million tokens" not in out


# --- prices -------------------------------------------------------------------------------------------------


def test_several_gpus_are_one_table_in_the_order_asked(flopcast: Command) -> None:
    many = ("predict", "--gpus", "l4,H200,nvidia-l4", "--config", "qwen3-0.6b", "--on", "2026-11-15")
    documents = flopcast(*many, "--json").document
    assert [one["gpu"] for one in documents] == ["nvidia-l4", H200]
    alone = flopcast("predict", "--gpu", H200, "--config", "qwen3-0.6b", "--on", "2026-11-15", "--json").document
    assert documents[1].keys() == alone.keys()
    assert documents[1]["step_seconds"] == pytest.approx(alone["step_seconds"], rel=1e-9)
    shown = flopcast(*many).out
    assert shown.index(" l4 ") < shown.index(" h200 ")
    for part in ("4 x 256 tokens", "90% interval", "memory needed", "fits", "tokens/s", "$/M tokens", "projected",
                 "measured", "h200: $4.59/h"):  # fmt: skip
        assert part in shown
    by_time = flopcast(*many, "--sort", "time", "--json").document
    assert [one["gpu"] for one in by_time] == [H200, "nvidia-l4"]
    assert by_time[0]["step_seconds"] < by_time[1]["step_seconds"]


def test_what_does_not_fit_comes_last_and_costs_nothing(flopcast: Command) -> None:
    many = ("predict", "--gpus", "l4,h200", "--config", "qwen3-4b", "--on", "2026-11-15", "--sort", "dollars")
    assert [one["fits"] for one in flopcast(*many, "--json").document] == [True, False]
    row = next(line for line in flopcast(*many).out.splitlines() if line.startswith(" l4"))
    assert row.split()[-4:-1] == ["no", "-", "-"]


def test_the_largest_batch_of_several_gpus(flopcast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("many.py").write_text(
        "import torch\ndef pair(batch=4):\n    return torch.nn.Linear(64, 8), torch.randn(batch, 2**16, 64)\n"
    )
    many = ("predict", "--gpus", "l4,h200", "--module", "many.py:pair", "--largest-batch")
    small, large = (one["largest_batch"] for one in flopcast(*many, "--json").document)
    assert 100 < small < large
    assert "largest batch" in flopcast(*many).out


def test_a_price_of_the_command_line_counts(flopcast: Command) -> None:
    found = predict(flopcast, "--price", f"{H200}=2.0")
    assert (found["price"]["usd_per_hour"], found["price"]["provider"]) == (2.0, "given")
    assert found["usd_per_step"] == pytest.approx(2.0 / 3600 * found["step_seconds"])
    assert "as given" in flopcast(*PREDICT, "--price", f"{H200}=2.0").out


def test_an_older_day_has_its_own_price(flopcast: Command) -> None:
    newest, article = predict(flopcast), predict(flopcast, "--on", "2025-11-15")
    assert article["price"] == {"usd_per_hour": 3.59, "provider": "RunPod Secure Cloud", "date": "2025-11-15",
                                "age_days": 0}  # fmt: skip
    assert newest["price"]["date"] > article["price"]["date"]
    before = flopcast(*PREDICT, "--on", "2019-01-01", "--json")
    assert before.document["price"] is None
    assert "no price of nvidia-h200" in before.err


def test_an_old_price_is_said_with_its_age_and_a_missing_one_ends_nothing(flopcast: Command) -> None:
    old = flopcast("predict", "--gpu", "nvidia-l40s", "--width", 512, "--on", "2026-11-15").out
    assert "about 2025-06-15, 518 days old" in " ".join(old.split())
    none = flopcast("predict", "--gpu", "nvidia-a10g", "--width", 512)
    assert none.code == 0
    assert "price │ - (give --price nvidia-a10g=USD_PER_HOUR)" in " ".join(none.out.split())


def test_another_provider_and_another_book(flopcast: Command, tmp_path: Path) -> None:
    assert predict(flopcast, "--provider", "Hyperstack")["price"]["provider"] == "Hyperstack"
    book = tmp_path / "book.csv"
    book.write_text(f"gpu,provider,kind,usd_per_hour,date\n{H200},acme,on-demand,1.25,2026-01-01\n")
    found = predict(flopcast, "--prices", book, "--provider", "acme")
    assert found["price"].items() >= {"usd_per_hour": 1.25, "provider": "acme", "date": "2026-01-01"}.items()


# --- gpus, roofline -----------------------------------------------------------------------------------------


def test_every_gpu_is_listed_with_how_it_came_about(flopcast: Command) -> None:
    found = {entry["name"]: entry for entry in flopcast("gpus", "--json").document}
    assert set(found) >= set(load_specs())
    assert found[H200]["basis"] == "measured"
    assert found[H200]["source"].startswith("shipped; kinds not measured scaled from")
    assert found["nvidia-l4"]["basis"] == "projected"
    assert H200 in found["nvidia-l4"]["source"]
    assert "projected" in flopcast("gpus").out


def test_roofs_are_printed_with_what_they_rest_on(flopcast: Command) -> None:
    found = flopcast("roofline", "--gpu", H200, "--json").document
    assert (found["gpu"], found["basis"]) == (H200, "measured")
    for number in (*found["ceilings"].values(), *found["peaks"].values()):
        assert number["low"] <= number["value"] <= number["high"]
        assert number["basis"]
    assert {"hbm_copy", "matrix_burst/bf16", "matrix_sustained/bf16", "kernel_floor"} <= set(found["ceilings"])
    shown = flopcast("roofline", "--gpu", H200).out
    assert "TFLOP/s" in shown
    assert "FLOP per byte" in shown


def test_a_module_by_name(flopcast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one_linear.py").write_text(
        "import torch\ndef pair(batch=4):\n    return torch.nn.Linear(64, 8), torch.randn(batch, 64)\n"
    )
    found = flopcast("predict", "--gpu", H200, "--module", "one_linear:pair", "--batch", 32, "--json")
    assert found.code == 0, found.err
    record = json.loads(found.out)
    assert record["n_params"] == 64 * 8 + 8
    assert record["flops_counted"] == 2 * 2 * 32 * 64 * 8  # forward and the weights' gradient
    assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(32)
    assert record["unit"] == "samples"
    shown = flopcast("predict", "--gpu", H200, "--module", "one_linear:pair", "--batch", 32).out
    assert "32 samples" in shown
    assert "samples per second" in shown
    assert "per million samples" in shown
    assert "token" not in shown
    assert "samples/s" in flopcast("explain", "--gpu", H200, "--module", "one_linear:pair", "--batch", 32).out
    assert flopcast("predict", "--gpu", H200, "--width", 512, "--json").document["unit"] == "tokens"
